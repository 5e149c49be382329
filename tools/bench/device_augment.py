"""Time of two CIFAR-sized views for whole batches: the device engine and kornia, interleaved.

    python tools/bench/device_augment.py [--blur] [--size 32] [--batch 256]
                                         [--rounds 20] [--device cpu|cuda]

Crop (.08-1), flip, color jitter (p .8, strengths .8 .8 .8 .2), gray (.2), with ``--blur`` also
blur (.5, sigma .1-2); from uint8 (B, H, W, 3) on the device to normalized float32 (B, 3, H, W). One
thread is used. Each round runs every entry once; the first entry changes with the round. Figures
are the median and the minimum over rounds of the time per image (both views): process CPU time on a
CPU, wall time on a GPU.

``selftask device`` draws for the whole batch, packs and makes the views, as with
``data.cache=device``. ``without draws`` gets the draws. ``selftask cpu`` is the other engine, image
by image. The operations differ in some ways: kornia draws the order of the jitter per batch, and
does not antialias crops.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import augment  # beside this file; it finds selftask
import numpy as np
import torch

from selftask.data.device.engine import Engine
from selftask.data.views import Views

Work = Callable[[], Any]


def batch_of(count: int, size: int) -> np.ndarray:
    """Return smooth images with noise, uint8 (count, size, size, 3)."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:size, 0:size]
    planes = [np.sin(x / 7) * np.cos(y / 5), np.cos(x / 11 + y / 6), np.sin(y / 9) * np.sin(x / 4)]
    smooth = np.stack(planes, -1) * 100 + 128 + rng.normal(0, 10, (count, size, size, 3))
    return np.ascontiguousarray(smooth.clip(0, 255).astype(np.uint8))


def entries(contest: augment.Contest, pixels: np.ndarray, device: str) -> dict[str, Work]:
    """Return the entries by name; kornia only if it is installed."""
    config = augment.view_configs(contest)
    views = Views(config)
    on_device = torch.from_numpy(pixels).to(device)
    sizes = np.tile(pixels.shape[1:3], (len(pixels), 1))
    numbers, epochs = np.arange(len(pixels)), np.zeros(len(pixels), dtype=np.int64)
    engine = Engine(views, config)
    ready = engine.draw_batch(0, epochs, numbers, sizes).to(on_device.device)

    def drawn_and_made() -> Any:
        packed = engine.draw_batch(0, epochs, numbers, sizes)
        return engine(on_device, None, packed.to(on_device.device))

    def one_by_one() -> Any:
        made = [views(image, 0, 0, n) for n, image in enumerate(pixels)]
        stacked = [torch.from_numpy(np.stack(view)) for view in zip(*made, strict=True)]
        return [to_float(v) for to_float, v in zip(views.to_float, stacked, strict=True)]

    works: dict[str, Work] = {
        "selftask device": drawn_and_made,
        "  without draws": lambda: engine(on_device, None, ready),
    }
    if device == "cpu":
        works["selftask cpu"] = one_by_one
    try:
        works["kornia"] = kornia(contest, on_device)
    except ImportError as error:
        print(f"kornia is left out: {error}")
    return works


def kornia(contest: augment.Contest, pixels: torch.Tensor) -> Work:
    """Return a function that runs kornia's pipelines on the same bytes."""
    pipelines = [pipeline.to(pixels.device) for pipeline in augment.kornia_pipelines(contest)]

    def work() -> Any:
        batch = pixels.permute(0, 3, 1, 2).float() / 255
        return [pipeline(batch) for pipeline in pipelines]

    return work


def measure(works: dict[str, Work], rounds: int, count: int, device: str) -> dict[str, list[float]]:
    """Return microseconds per image, one figure per round."""

    def now() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    names = list(works)
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            start = now()
            works[name]()
            times[name].append(1e6 * (now() - start) / count)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blur", action="store_true")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    contest = augment.Contest([(2, args.size, (0.08, 1.0))], blur=args.blur, encoded=False)
    pixels = batch_of(args.batch, args.size)
    works = entries(contest, pixels, args.device)
    times = measure(works, args.rounds, args.batch, args.device)
    ours = statistics.median(times["selftask device"])
    print(
        f"two views of {args.size}, batch {args.batch}, {args.rounds} rounds, {args.device}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':24}{'us/image':>10}{'least':>10}{'images/s':>10}{'x selftask':>12}")
    for entry, all_us in times.items():
        middle, least = statistics.median(all_us), min(all_us)
        print(f"{entry:24}{middle:10.1f}{least:10.1f}{1e6 / middle:10.0f}{middle / ours:12.2f}")


if __name__ == "__main__":
    main()
