"""Posterize, solarize, equalize, autocontrast, invert and sharpness, as in Pillow; PCA noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.transforms.channels import by_groups, needs_rgb
from selftask.data.transforms.transform import Toggled, Transform, UniformTransform
from selftask.registry import register_transform

_VALUES = np.arange(256)
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
_COMPONENTS = np.array(  # of red, green and blue; each column is an eigenvector
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)


@register_transform("posterize")
@dataclass(frozen=True, kw_only=True)
class Posterize(Toggled):
    """Keep the highest ``bits`` bits of every value, with probability p."""

    bits: int = setting(4, min=1, max=8)
    """Number of bits to keep of each value; 8 changes nothing."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return posterize(image, self.bits)


@register_transform("equalize")
class Equalize(Toggled):
    """Equalize the histogram of each channel, with probability p."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return equalize(image)


@register_transform("autocontrast")
class Autocontrast(Toggled):
    """Stretch the values of each channel to the full range 0..255, with probability p."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return autocontrast(image)


@register_transform("invert")
class Invert(Toggled):
    """Invert all values to 255 - x, with probability p."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return cv2.bitwise_not(image).reshape(image.shape)


@register_transform("sharpness")
@dataclass(frozen=True, kw_only=True)
class Sharpness(UniformTransform):
    """Sharpen or smooth by a random factor, with probability p."""

    num_uniforms: ClassVar[int] = 2

    factor: tuple[float, float] = setting((0.0, 2.0), min=0, rising=True)
    """Range of the factor: 0 is smooth, 1 unchanged, 2 sharp."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return whether the image is changed, and the factor."""
        chance, draw = uniforms
        low, high = self.factor
        return chance < self.p, low + (high - low) * draw

    def apply(self, image: np.ndarray, params: float) -> np.ndarray:
        return adjust_sharpness(image, params)


@register_transform("lighting")
@dataclass(frozen=True, kw_only=True)
class Lighting(Transform):
    """Shift the colors along the principal components of ImageNet's colors (AlexNet's PCA noise).

    Krizhevsky et al., ImageNet Classification with Deep Convolutional Neural Networks, 2012. The
    components are taken from Facebook's ResNet code, for values on the scale [0, 1].
    """

    std: float = setting(0.1, min=0, also=["alphastd"])
    """Standard deviation of the shift along a component, in units of its eigenvalue."""

    def channel_problems(self, channels: int) -> Iterator[str]:
        yield from needs_rgb(f"std: {self.std}", channels, "leave lighting out")

    def draw(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray:
        """Return the shifts (3,) of red, green and blue on the scale [0, 255]."""
        return 255 * _COMPONENTS @ (self.std * rng.standard_normal(3) * _EIGENVALUES)

    def numbers(self, params: np.ndarray | None) -> Sequence[float]:
        """Return the shifts of red, green and blue on the scale [0, 255]."""
        return (0.0, 0.0, 0.0) if params is None else tuple(params.tolist())

    def apply(self, image: np.ndarray, params: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(image + params), 0, 255).astype(np.uint8)


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep the highest ``bits`` bits of every value, uint8 (H, W, C); 0 bits give black."""
    return image & np.uint8(256 - 2 ** (8 - bits) if bits else 0)


def solarize(image: np.ndarray, threshold: float) -> np.ndarray:
    """Invert the values, uint8 (H, W, C), that are at least ``threshold``."""
    changed = (image >= math.ceil(threshold)).view(np.uint8)
    np.negative(changed, out=changed)  # 1 becomes 255
    return np.bitwise_xor(image, changed, out=changed)


def autocontrast(image: np.ndarray) -> np.ndarray:
    """Stretch each channel of uint8 (H, W, C) to 0..255; a constant channel is unchanged."""
    return by_groups(_stretched, image)


def _stretched(image: np.ndarray) -> np.ndarray:
    channels = 1 if image.ndim == 2 else image.shape[2]
    rows = image.reshape(image.shape[0], -1)  # NumPy compares along rows many values at once
    low = rows.min(axis=0).reshape(-1, channels).min(axis=0).astype(int)
    high = rows.max(axis=0).reshape(-1, channels).max(axis=0).astype(int)
    scale = np.where(high > low, 255 / np.maximum(high - low, 1), 1.0)
    offset = np.where(high > low, -low * scale, 0.0)
    tables = _VALUES[:, None] * scale + offset  # (256, C)
    return cv2.LUT(image, np.clip(tables, 0, 255).astype(np.uint8)[None])


def equalize(image: np.ndarray) -> np.ndarray:
    """Equalize the histogram of each channel of uint8 (H, W, C), rounded like Pillow."""
    return by_groups(_equalized, image)


def _equalized(image: np.ndarray) -> np.ndarray:
    channels = range(1 if image.ndim == 2 else image.shape[2])
    tables = [_flat_table(cv2.calcHist([image], [c], None, [256], [0, 256])) for c in channels]
    return cv2.LUT(image, np.stack(tables, axis=1)[None])


def _flat_table(histogram: np.ndarray) -> np.ndarray:
    """Return the table uint8 (256,) that flattens a histogram, float (256, 1)."""
    counts = histogram.ravel().astype(np.int64)
    present = np.flatnonzero(counts)
    step = 0 if len(present) <= 1 else int(counts.sum() - counts[present[-1]]) // 255
    if not step:
        return _VALUES.astype(np.uint8)
    below = np.cumsum(counts) - counts
    return np.minimum((step // 2 + below) // step, 255).astype(np.uint8)


def adjust_sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """Sharpen (factor above 1) or smooth (below 1) an image, uint8 (H, W, C), except its border.

    Extrapolates from or interpolates toward a smoothed image, like Pillow. Its smoothing kernel is
    [1 1 1; 1 5 1; 1 1 1] / 13, which is 9/13 of the 3x3 mean and 4/13 of the pixel.
    """
    return by_groups(lambda part: _sharpened(part, factor), image)


def _sharpened(image: np.ndarray, factor: float) -> np.ndarray:
    mean = cv2.blur(image, (3, 3))
    smooth = (1 - factor) / 13
    changed = cv2.addWeighted(image, factor + 4 * smooth, mean, 9 * smooth, 0.0)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        changed[edge] = image[edge]
    return changed
