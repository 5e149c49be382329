"""CPU time of each form of a transform for one image: OpenCV or NumPy, torch, compiled kernel.

    python tools/bench/transform_forms.py [--side 224] [--channels 3]

Both engines could share the torch form. This tool shows its cost for the CPU engine, which
processes single images: microseconds of process CPU time on one thread, without drawing parameters.
The torch form includes the conversion of one uint8 image to planes of floats and back.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "data"))

import numpy as np
import torch
from both_engines import smooth_images

from selftask.data import kernel
from selftask.data.device.compose import Chain
from selftask.data.device.operation import Images, find_batched_transform
from selftask.data.device.packing import pack
from selftask.data.transforms.channels import RGB, channel_problems, for_channels
from selftask.registry import TRANSFORMS

JITTER: dict[str, Any] = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
ALWAYS = {"p": 1.0}


def cases(side: int) -> dict[str, dict[str, Any]]:
    """Return the transforms with their arguments."""
    return {
        "random_resized_crop": {"size": side // 2},
        "resize": {"size": side // 2},
        "center_crop": {"size": side // 2},
        "random_crop": {"size": side, "padding": 4},
        "color_jitter": JITTER,
        "contrast_noise": {"contrast": (0.5, 1.0), "noise": 0.02},
        "rotation": {"degrees": 30},
        "random_affine": {"degrees": 30},
        "random_shear": {"x": 10.0},
        "rotate_90": {"k": [1]},
        "jigsaw": {},
        "lab": {},
        "lightness": {},
        "bgr": {},
        "rand_augment": {},
        "aug_mix": {},
        **dict.fromkeys(("horizontal_flip", "vertical_flip", "grayscale", "gaussian_blur"), ALWAYS),
        **dict.fromkeys(("solarize", "posterize", "equalize", "autocontrast", "invert"), ALWAYS),
        **dict.fromkeys(("sharpness", "random_perspective", "elastic", "channel_drop"), ALWAYS),
        **dict.fromkeys(("random_erasing", "cutout", "gaussian_noise", "salt_and_pepper"), ALWAYS),
    }


def microseconds(work: Callable[[], Any]) -> float:
    """Return the minimum CPU time of a call, in five rounds of about 20 ms."""
    started = time.process_time()
    work()
    calls = max(3, int(0.02 / max(1e-6, time.process_time() - started)))
    least = float("inf")
    for _ in range(5):
        started = time.process_time()
        for _ in range(calls):
            work()
        least = min(least, (time.process_time() - started) / calls)
    return least * 1e6


def torch_form(name: str, transform: Any, params: Any, image: np.ndarray) -> Callable[[], Any]:
    """Return the device engine's form for one image, from and to uint8 (H, W, C)."""
    chain = Chain([find_batched_transform(name, transform)])
    sizes = np.array([image.shape[:2]])

    def work() -> np.ndarray:
        steps = pack([chain.pack([[params]], sizes)[0]]).steps(0)
        planes = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
        values = planes.to(torch.float32, memory_format=torch.contiguous_format)
        made = chain.apply(Images(values, None, dense=False), steps).values
        pixels: np.ndarray = made[0].permute(1, 2, 0).to(torch.uint8).contiguous().numpy()
        return pixels

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--channels", type=int, default=RGB)
    args = parser.parse_args()
    torch.set_num_threads(1)
    image = smooth_images(1, args.side, args.side, channels=args.channels)[0]
    print(f"{'us an image':22}{'kernel':>9}{'opencv':>9}{'torch':>9}{'torch/opencv':>14}")
    for name, keys in cases(args.side).items():
        transform = for_channels(TRANSFORMS[name](**keys), args.channels)
        if list(channel_problems(transform, args.channels)):
            continue
        params = transform.draw(np.random.default_rng(0), args.side, args.side)
        by_opencv = microseconds(lambda t=transform, p=params: t.apply(image, p))
        by_torch = microseconds(torch_form(name, transform, params, image))
        program = transform.program(params) if args.channels == RGB else None
        compiled = "-"
        if program and kernel.available():
            out = np.empty_like(transform.apply(image, params))
            compiled = f"{microseconds(lambda p=program, o=out: kernel.run(image, p, o)):.0f}"
        ratio = by_torch / by_opencv
        print(f"{name:22}{compiled:>9}{by_opencv:9.0f}{by_torch:9.0f}{ratio:14.1f}")


if __name__ == "__main__":
    main()
