"""Corruptions of images at the five strengths of ImageNet-C.

Hendrycks and Dietterich, ICLR 2019, arXiv:1903.12261, with the strengths of the authors' code.
Lengths in pixels are for an image whose shorter side has 224 pixels; they are scaled for other
sizes. The functions take and return uint8 images (H, W, C), and compute in the range [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from selftask.config.schema import Component
from selftask.data.transforms.channels import by_groups

_SIDE = 224  # pixels, of ImageNet-C
_REACH = 8  # pixels; the kernel of a smaller disk has these as well
_ROUGHNESS = 100.0  # of the first points of a plasma fractal; noise has its square


@dataclass(frozen=True)
class Corruption:
    """A corruption at the five strengths of ImageNet-C.

    Attributes:
        strengths: The strengths: a number or a pair of numbers each.
        transforms: Strength and shorter side of the images in pixels -> transforms.
    """

    strengths: tuple[Any, ...]
    transforms: Callable[[Any, float], list[Component]]


def gaussian_noise(image: np.ndarray, rng: np.random.Generator, sigma: float) -> np.ndarray:
    """Add normal noise of standard deviation ``sigma``, on the scale [0, 1]."""
    return _rounded(image / 255 + sigma * rng.standard_normal(image.shape))


def shot_noise(image: np.ndarray, rng: np.random.Generator, rate: float) -> np.ndarray:
    """Replace values x in [0, 1] by Poisson draws of mean ``rate`` * x, divided by ``rate``."""
    return _rounded(rng.poisson(image / 255 * rate) / rate)


def impulse_noise(image: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Set each value to 0 or 1 with probability ``share``, separately in each channel."""
    is_changed, is_white = rng.random((2, *image.shape)) < np.reshape([share, 0.5], (2, 1, 1, 1))
    return np.where(is_changed, np.where(is_white, 255, 0), image).astype(np.uint8)


def defocus_blur(
    image: np.ndarray, rng: np.random.Generator, radius: float, softness: float
) -> np.ndarray:
    """Average over a disk whose kernel is smoothed by a Gaussian, its anti-aliasing.

    Args:
        image: The image.
        rng: Not used.
        radius: Radius of the disk, in pixels.
        softness: Standard deviation of the Gaussian, in pixels.
    """
    kernel = disk_kernel(radius, softness)
    return by_groups(lambda part: cv2.filter2D(part, -1, kernel), image)


def fog(image: np.ndarray, rng: np.random.Generator, amount: float, decay: float) -> np.ndarray:
    """Add a plasma fractal, and scale the sum so that it is at most the image's brightest value.

    Args:
        image: The image.
        rng: Generator of the fractal.
        amount: Weight of the fractal, whose values are from 0 to 1.
        decay: Decay of its roughness; larger values give smoother fog.
    """
    height, width = image.shape[:2]
    size = 1 << (max(height, width) - 1).bit_length()
    cloud = plasma_fractal(size, decay, rng)[:height, :width, None]
    brightest = image.max() / 255
    return _rounded((image / 255 + amount * cloud) * brightest / (brightest + amount))


def brightness(image: np.ndarray, rng: np.random.Generator, offset: float) -> np.ndarray:
    """Add ``offset`` to the value of HSV, on the scale [0, 1]; hue and saturation are kept."""
    x = image / 255
    value = x.max(axis=2, keepdims=True)
    brighter = np.minimum(value + offset, 1)
    return _rounded(np.where(value > 0, x * brighter / np.maximum(value, 1 / 255), brighter))


def contrast(image: np.ndarray, rng: np.random.Generator, factor: float) -> np.ndarray:
    """Multiply the differences from the mean of each channel by ``factor``."""
    x = image / 255
    mean = x.mean(axis=(0, 1))
    return _rounded((x - mean) * factor + mean)


def disk_kernel(radius: float, softness: float) -> np.ndarray:
    """Return the kernel of ``defocus_blur``, float64 (K, K).

    K is 2 * ceil(``radius``) + 1, and at least 17.

    Args:
        radius: Radius of the disk, in pixels.
        softness: Standard deviation of the Gaussian, in pixels.
    """
    reach = max(_REACH, math.ceil(radius))
    steps = np.arange(-reach, reach + 1)
    disk = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.float64)
    size = 3 if radius <= _REACH else 5
    return cv2.GaussianBlur(disk / disk.sum(), (size, size), sigmaX=softness)


def plasma_fractal(size: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """Return a periodic height map (S, S) from 0 to 1, by the diamond-square algorithm.

    Fournier et al., Communications of the ACM 1982. A point is the mean of its four neighbors on
    the grid so far plus uniform noise, whose amplitude falls by ``decay ** 2`` with each grid.

    Args:
        size: S, a power of two.
        decay: Decay of the roughness.
        rng: Generator of the noise.
    """
    heights = np.zeros((size, size))
    step, roughness = size, _ROUGHNESS

    def place(rows: int, columns: int, first: np.ndarray, second: np.ndarray) -> None:
        noise = roughness * rng.uniform(-roughness, roughness, first.shape)
        heights[rows::step, columns::step] = (first + second) / 4 + noise

    while step > 1:
        half = step // 2
        corners = heights[::step, ::step]
        across, down = (corners + np.roll(corners, -1, axis) for axis in (1, 0))
        place(half, half, across, np.roll(across, -1, axis=0))
        centers = heights[half::step, half::step]
        place(0, half, across, centers + np.roll(centers, 1, axis=0))
        place(half, 0, down, centers + np.roll(centers, 1, axis=1))
        step, roughness = half, roughness / decay
    heights -= heights.min()
    return heights / heights.max()


def _rounded(x: np.ndarray) -> np.ndarray:
    """Return uint8 for values on the scale [0, 1], clipped."""
    return np.rint(255 * x.clip(0, 1)).astype(np.uint8)


def _by(formula: Callable[..., np.ndarray], **args: float) -> list[Component]:
    name = f"{__name__}:{formula.__name__}"
    return [Component(name="custom", args={"transform": name, "args": args})]


def _always(name: str, **ranges: float) -> list[Component]:
    """Return a transform that always draws these values."""
    args: dict[str, Any] = {key: [value] * 2 for key, value in ranges.items()}
    return [Component(name=name, args={**args, "p": 1.0})]


def _pixelate(share: float, side: float) -> list[Component]:
    small = {"size": max(1, round(share * side)), "interpolation": "bilinear"}
    large = {"size": side, "interpolation": "nearest"}
    return [Component(name="resize", args=small), Component(name="resize", args=large)]


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(
        (0.08, 0.12, 0.18, 0.26, 0.38), lambda sigma, side: _by(gaussian_noise, sigma=sigma)
    ),
    "shot_noise": Corruption((60, 25, 12, 5, 3), lambda rate, side: _by(shot_noise, rate=rate)),
    "impulse_noise": Corruption(
        (0.03, 0.06, 0.09, 0.17, 0.27), lambda share, side: _by(impulse_noise, share=share)
    ),
    "gaussian_blur": Corruption(
        (1, 2, 3, 4, 6), lambda sigma, side: _always("gaussian_blur", sigma=sigma * side / _SIDE)
    ),
    "defocus_blur": Corruption(
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        lambda disk, side: _by(defocus_blur, radius=disk[0] * side / _SIDE, softness=disk[1]),
    ),
    "motion_blur": Corruption(
        (6, 10, 17, 25, 31),  # of a uniform line as wide as the paper's half Gaussian
        lambda length, side: _always("motion_blur", length=max(1, length * side / _SIDE)),
    ),
    "zoom_blur": Corruption(
        (1.1, 1.15, 1.2, 1.24, 1.3), lambda zoom, side: _always("zoom_blur", zoom=zoom)
    ),
    "fog": Corruption(
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        lambda pair, side: _by(fog, amount=pair[0], decay=pair[1]),
    ),
    "contrast": Corruption(
        (0.4, 0.3, 0.2, 0.1, 0.05), lambda factor, side: _by(contrast, factor=factor)
    ),
    "brightness": Corruption(
        (0.1, 0.2, 0.3, 0.4, 0.5), lambda offset, side: _by(brightness, offset=offset)
    ),
    "pixelate": Corruption((0.6, 0.5, 0.4, 0.3, 0.25), _pixelate),
    "jpeg": Corruption((25, 18, 15, 10, 7), lambda quality, side: _always("jpeg", quality=quality)),
}
