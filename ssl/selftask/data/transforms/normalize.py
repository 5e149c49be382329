"""From 8-bit pixels to the float32 array (3, H, W) that a network gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from PIL import Image

from selftask.registry import register_transform

STATISTICS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def to_float(image: Image.Image | np.ndarray) -> np.ndarray:
    """float32 (3, H, W) in [0, 1] of an RGB image; an array is returned as it is."""
    if isinstance(image, np.ndarray):
        return image
    values: np.ndarray = np.multiply(
        _planes(image), np.float32(1 / 255), dtype=np.float32, order="C"
    )
    return values


@register_transform("normalize")
@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Subtract a mean and divide by a standard deviation, per channel, on the scale [0, 1]."""

    of: Literal["imagenet", "cifar10", "cifar100", "half"] = "imagenet"  # whose mean and std
    mean: list[float] | None = None  # your own three instead, together with std
    std: list[float] | None = None

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if (self.mean is None) != (self.std is None):
            yield "mean: mean and std go together; give both or neither"
        for key, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != 3:
                yield f"{key}: {len(values)} numbers, there are 3 channels"
        if self.std is not None and min(self.std, default=1) <= 0:
            yield "std: must be above 0"

    def __call__(self, image: Image.Image | np.ndarray, rng: np.random.Generator) -> np.ndarray:
        mean, std = STATISTICS[self.of] if self.mean is None else (self.mean, self.std)
        pixels, full = (image, 1.0) if isinstance(image, np.ndarray) else (_planes(image), 255.0)
        scale, shift = _affine(tuple(mean), tuple(std or ()), full)
        values: np.ndarray = np.multiply(pixels, scale, dtype=np.float32, order="C")
        values += shift
        return values


@lru_cache(maxsize=16)
def _affine(
    mean: tuple[float, ...], std: tuple[float, ...], full: float
) -> tuple[np.ndarray, np.ndarray]:
    """(x / full - mean) / std as one scale and one shift, (3, 1, 1) float32 each."""
    centre = np.array(mean, dtype=np.float64)
    width = np.array(std, dtype=np.float64)
    scale = (1 / (full * width)).astype(np.float32)
    return scale[:, None, None], (-centre / width).astype(np.float32)[:, None, None]


def _planes(image: Image.Image) -> np.ndarray:
    """The pixels as uint8 (3, H, W), a view of (H, W, 3)."""
    planes: np.ndarray = np.asarray(image).transpose(2, 0, 1)
    return planes
