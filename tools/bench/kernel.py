"""Time of each augmentation in microseconds: the compiled kernel and equivalent OpenCV calls.

    python tools/bench/kernel.py [--size 224 32] [--rounds 60] [--variants avx512 avx2]

Each round runs every entry once, so that other load on the machine affects all equally. Each figure
is the minimum CPU time of a call over all rounds, on one thread, with buffers in the cache. OpenCV
has no antialiased bilinear resize: there, `cv2` is INTER_LINEAR, and `torch` is the antialiased
resize for uint8. `view` is a SimCLR view with all operations; `drawn` is the mean over 50 views
with SimCLR's probabilities (jitter 0.8, gray 0.2, blur 0.5 at 224 and none at 32, flip 0.5).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.data import kernel
from selftask.data.kernel import Filter, Op

LUMA = np.array([0.299, 0.587, 0.114])
Call = Callable[[], object]


def matrix(brightness: float = 1.0, saturation: float = 1.0) -> np.ndarray:
    blend = saturation * np.eye(3) + (1 - saturation) * np.tile(LUMA, (3, 1))
    return np.hstack([brightness * blend, np.zeros((3, 1))])


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    mean = round(float(np.dot(cv2.mean(image)[:3], LUMA)))
    return cv2.transform(
        image, np.hstack([factor * np.eye(3), np.full((3, 1), (1 - factor) * mean)])
    )


def hue(image: np.ndarray, turn: float) -> np.ndarray:
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    hsv[..., 0] += np.uint8(int(turn * 255) % 256)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def gray(image: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def solarize(image: np.ndarray, threshold: float) -> np.ndarray:
    return cv2.bitwise_xor(image, cv2.compare(image, threshold, cv2.CMP_GE))


def with_cv2(image: np.ndarray, program: list[list[float]]) -> np.ndarray:
    """Apply the same operations one by one, with OpenCV."""
    for code, *a in program:
        if code == Op.CROP_RESIZE:
            left, top, width, height, rows, columns = map(int, a[:6])
            crop = image[top : top + height, left : left + width]
            kind = (cv2.INTER_LINEAR, cv2.INTER_CUBIC)[int(a[6])]
            image = cv2.resize(crop, (columns, rows), interpolation=kind)
        elif code == Op.HFLIP:
            image = cv2.flip(image, 1)
        elif code == Op.MATRIX:
            image = cv2.transform(image, np.reshape(a, (3, 4)))
        elif code == Op.CONTRAST:
            image = contrast(image, a[0])
        elif code == Op.HUE:
            image = hue(image, a[0])
        elif code == Op.GRAY:
            image = gray(image)
        elif code == Op.BLUR:
            image = cv2.GaussianBlur(image, (0, 0), a[0])
        else:
            image = solarize(image, a[0])
    return image


def with_torch(image: np.ndarray, program: list[list[float]]) -> object:
    """Apply the antialiased resize only; the memory layout stays (H, W, 3)."""
    (_, left, top, width, height, rows, columns, kind), *_ = program
    crop = image[int(top) : int(top + height), int(left) : int(left + width)]
    return torch.nn.functional.interpolate(
        torch.from_numpy(crop)[None].permute(0, 3, 1, 2),
        (int(rows), int(columns)),
        mode=Filter(int(kind)).name.lower(),
        antialias=True,
    )


def view(size: int, source: int, rng: np.random.Generator | None = None) -> list[list[float]]:
    """Return the program of a SimCLR view with all operations, or with drawn ones."""

    def on(p: float) -> bool:
        return rng is None or rng.random() < p

    def draw(low: float, high: float) -> float:
        return (low + high) / 2 + 0.11 if rng is None else low + (high - low) * rng.random()

    side = source if rng is None else max(2, round(source * float(np.sqrt(draw(0.2, 1.0)))))
    program = [[Op.CROP_RESIZE, 0, 0, side, side, size, size, Filter.BILINEAR]]
    if on(0.5):
        program.append([Op.HFLIP])
    if on(0.8):
        jitter = [
            [Op.MATRIX, *matrix(brightness=draw(0.2, 1.8)).ravel()],
            [Op.CONTRAST, draw(0.2, 1.8)],
            [Op.MATRIX, *matrix(saturation=draw(0.2, 1.8)).ravel()],
            [Op.HUE, draw(-0.2, 0.2)],
        ]
        order = range(4) if rng is None else rng.permutation(4)
        program += [jitter[i] for i in order]
    if on(0.2):
        program.append([Op.GRAY])
    if on(0.5 if size > 64 else 0.0):
        program.append([Op.BLUR, draw(0.1, 2.0)])
    return program


def programs(size: int) -> dict[str, tuple[int, list[list[list[float]]]]]:
    """Return for each name the side of the source and one or more programs."""
    large, half = size * 4 // 3, size // 2
    rng = np.random.default_rng(0)
    resize = [Op.CROP_RESIZE, 0, 0]
    return {
        "nothing": (size, [[]]),
        "resize down": (large, [[[*resize, large, large, size, size, 0]]]),
        "resize up": (half, [[[*resize, half, half, size, size, 0]]]),
        "bicubic down": (large, [[[*resize, large, large, size, size, 1]]]),
        "flip": (size, [[[Op.HFLIP]]]),
        "brightness": (size, [[[Op.MATRIX, *matrix(1.3).ravel()]]]),
        "contrast": (size, [[[Op.CONTRAST, 0.7]]]),
        "saturation": (size, [[[Op.MATRIX, *matrix(1.0, 1.6).ravel()]]]),
        "hue": (size, [[[Op.HUE, 0.1]]]),
        "gray": (size, [[[Op.GRAY]]]),
        "blur 0.5": (size, [[[Op.BLUR, 0.5]]]),
        "blur 1": (size, [[[Op.BLUR, 1.0]]]),
        "blur 2": (size, [[[Op.BLUR, 2.0]]]),
        "solarize": (size, [[[Op.SOLARIZE, 128]]]),
        "view": (large, [view(size, large)]),
        "drawn": (large, [view(size, large, rng) for _ in range(50)]),
    }


def calls(size: int, name: str, variants: list[str]) -> dict[str, Call]:
    """Return one call per entry, which runs all programs of that name once."""
    side, several = programs(size)[name]
    image = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
    image = cv2.GaussianBlur(image, (0, 0), 2.0)  # similar neighbors, as in a photo
    out = np.empty((size, size, 3), np.uint8)
    flat = [[float(n) for part in program for n in part] for program in several]

    def ours(variant: str) -> Call:
        return lambda: [kernel._augment.run(image, program, out, variant) for program in flat]

    entries: dict[str, Call] = {variant: ours(variant) for variant in variants}
    entries["cv2"] = lambda: [with_cv2(image, program) for program in several]
    if name.split()[0] in ("resize", "bicubic"):
        entries["torch"] = lambda: [with_torch(image, program) for program in several]
    return entries


def measure(entries: dict[str, Call], rounds: int, count: int) -> dict[str, float]:
    """Return the minimum CPU microseconds of each call."""
    least = dict.fromkeys(entries, float("inf"))
    for turn in range(rounds):
        names = list(entries)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            repeats = max(1, count)
            entries[name]()
            start = time.process_time()
            for _ in range(repeats):
                entries[name]()
            least[name] = min(least[name], (time.process_time() - start) / repeats * 1e6)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs="+", default=[224, 32])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--variants", nargs="+", default=list(kernel.variants()[:1]))
    parser.add_argument("--only", nargs="+", help="names of the first column")
    chosen = parser.parse_args()
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f}; {kernel.variants()}; microseconds a call")
    for size in chosen.size:
        print(f"\n{size} x {size} x 3".ljust(24), *(f"{v:>9}" for v in chosen.variants), end="")
        print(f"{'cv2':>10}{'torch':>10}{'cv2/ours':>10}")
        for name in chosen.only or programs(size):
            entries = calls(size, name, chosen.variants)
            several = len(programs(size)[name][1])
            took = measure(entries, chosen.rounds, max(1, 200_000 // size**2 // several))
            took = {entry: value / several for entry, value in took.items()}
            ours = min(took[variant] for variant in chosen.variants)
            row = [
                f"{took[e]:9.1f}" if e in took else " " * 9
                for e in (*chosen.variants, "cv2", "torch")
            ]
            print(f"{name:23}", *row, f"{took['cv2'] / ours:9.1f}", flush=True)


if __name__ == "__main__":
    main()
