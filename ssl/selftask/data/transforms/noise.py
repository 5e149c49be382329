"""Noise and erased rectangles, on 8-bit images and thus before ``normalize``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.transforms.boxes import Box, first_fit, random_box
from selftask.data.transforms.channels import RGB, needs_number
from selftask.data.transforms.transform import Transform
from selftask.registry import register_transform

_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)])
_NORMAL /= _NORMAL.std()


class Hole(NamedTuple):
    """Rectangle in pixels (right and bottom are exclusive) and its fill, ``values``.

    The fill is uint8: a gray level, a color (C,), or a color for each pixel (H, W, C).
    """

    left: int
    top: int
    right: int
    bottom: int
    values: Any


@dataclass(frozen=True, kw_only=True)
class _WithHoles(Transform):
    """Transform that overwrites rectangles."""

    fill: int | list[int] | Literal["noise"] = setting(0, min=0, max=255)
    """Gray level, list of levels (one for each channel), or ``noise`` for random values."""

    def channel_problems(self, channels: int) -> Iterator[str]:
        if isinstance(self.fill, list):
            subject = f"fill: {self.fill}"
            yield from needs_number(subject, len(self.fill), channels, "or give one gray level")

    def hole(self, rng: np.random.Generator, left: int, top: int, right: int, bottom: int) -> Hole:
        """Return a rectangle and its fill values, which are drawn if ``fill`` is ``noise``.

        Args:
            rng: Generator of the draws.
            left: Left side, in pixels.
            top: Upper side, in pixels.
            right: Right side, in pixels, exclusive.
            bottom: Lower side, in pixels, exclusive.
        """
        values: Any = self.fill
        if values == "noise":
            values = _bytes(rng, bottom - top, right - left, self.channels)
        return Hole(left, top, right, bottom, np.asarray(values, dtype=np.uint8))

    def apply(self, image: np.ndarray, params: list[Hole]) -> np.ndarray:
        changed = image.copy()
        for hole in params:
            changed[hole.top : hole.bottom, hole.left : hole.right] = hole.values
        return changed


@register_transform("random_erasing")
@dataclass(frozen=True, kw_only=True)
class RandomErasing(_WithHoles):
    """Overwrite a random rectangle, with probability p (arXiv:1708.04896).

    The image is also unchanged if none of 10 drawn rectangles fits into it.
    """

    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""
    scale: tuple[float, float] = setting((0.02, 0.33), min=0, max=1, rising=True)
    """Range of the rectangle's area, as a fraction of the image's area."""
    ratio: tuple[float, float] = setting((0.3, 3.3), above=0, rising=True)
    """Range of the rectangle's height / width, drawn log-uniformly."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> list[Hole] | None:
        if rng.random() >= self.p:
            return None
        box = first_fit(rng, height, width, self.attempt)
        return None if box is None else [self.hole(rng, *box)]

    def attempt(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return whether a random box is smaller than the image, and the box.

        It is an ``Attempt`` of ``boxes``.

        Args:
            uniforms: Four numbers in [0, 1), or as many arrays (N,).
            height: Height of the image in pixels, a number or an array (N,).
            width: Width of the image in pixels, a number or an array (N,).
            xp: Math functions: ``SCALARS`` for numbers, NumPy for arrays.
        """
        of_area, of_ratio, of_left, of_top = uniforms
        turned = of_area, of_ratio, of_top, of_left  # because ``ratio`` is height / width
        top, left, h, w = random_box(turned, width, height, self.scale, self.ratio, xp)
        return (h < height) & (w < width), (left, top, left + w, top + h)


@register_transform("cutout")
@dataclass(frozen=True, kw_only=True)
class Cutout(_WithHoles):
    """Overwrite squares around random pixels, clipped at the border (arXiv:1708.04552)."""

    length: int = setting(16, min=1)
    """Side of a square, in pixels."""
    num_holes: int = setting(1, min=1)
    """Number of squares."""
    p: float = setting(1.0, min=0, max=1)
    """Probability that the transform is applied."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> list[Hole] | None:
        if rng.random() >= self.p:
            return None
        holes = []
        for of_width, of_height in rng.random((self.num_holes, 2)).tolist():
            box = self.box(of_width, of_height, height, width)
            holes.append(self.hole(rng, *box))
        return holes

    def box(self, of_width: float, of_height: float, height: int, width: int) -> Box:
        """Return left, top, right and bottom of the square around a pixel, clipped at the border.

        Args:
            of_width: Horizontal position of the pixel, as a fraction of the width.
            of_height: Vertical position of the pixel, as a fraction of the height.
            height: Height of the image, in pixels.
            width: Width of the image, in pixels.
        """
        left = math.floor(of_width * width) - self.length // 2
        top = math.floor(of_height * height) - self.length // 2
        right, bottom = min(left + self.length, width), min(top + self.length, height)
        return max(left, 0), max(top, 0), right, bottom


@register_transform("gaussian_noise")
@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Transform):
    """Add Gaussian noise of a random standard deviation, with probability p.

    Results are rounded to gray levels and clipped. Each noise value is one of 256 equally likely
    quantiles of the normal distribution, the largest of which is 2.9 sigma. Drawing them takes a
    fifth of the time of exact draws.
    """

    sigma: tuple[float, float] = setting((0.0, 0.1), min=0, max=1, rising=True)
    """Range of the standard deviation, on the scale [0, 1]."""
    gray: bool = False
    """Whether all channels get the same noise, so that gray pixels stay gray."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray | None:
        """Return the noise in gray levels, int16 (H, W, C), or None."""
        chance, strength = rng.random(2).tolist()
        if chance >= self.p:
            return None
        sigma = 255 * (self.sigma[0] + (self.sigma[1] - self.sigma[0]) * strength)
        table = np.rint(sigma * _NORMAL).astype(np.int16)
        indices = _bytes(rng, height, width, 1 if self.gray else self.channels)
        noise: np.ndarray = cv2.LUT(indices, table).reshape(indices.shape)
        if not self.gray:
            return noise
        if self.channels == RGB:  # in an eighth of the time of np.repeat
            return cv2.merge([noise] * RGB)
        return np.repeat(noise, self.channels, axis=2)

    def apply(self, image: np.ndarray, params: np.ndarray) -> np.ndarray:
        return cv2.add(image, params, dtype=cv2.CV_8U).reshape(image.shape)


@register_transform("salt_and_pepper")
@dataclass(frozen=True, kw_only=True)
class SaltAndPepper(Transform):
    """Set random pixels to black or white, with probability p."""

    amount: tuple[float, float] = setting((0.0, 0.05), min=0, max=1, rising=True)
    """Range of the fraction of pixels that are drawn; a pixel may be drawn more than once."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray | None:
        """Return pixel indices, row by row, int64 (N,), or None.

        The first half (rounded up) turns white, the others black.
        """
        chance, share = rng.random(2).tolist()
        if chance >= self.p:
            return None
        share = self.amount[0] + (self.amount[1] - self.amount[0]) * share
        return rng.integers(0, height * width, round(share * height * width))

    def apply(self, image: np.ndarray, params: np.ndarray) -> np.ndarray:
        changed = image.copy()
        pixels = changed.reshape(-1, image.shape[2])
        pixels[params[: -(-len(params) // 2)]] = 255
        pixels[params[-(-len(params) // 2) :]] = 0
        return changed


def _bytes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random bytes of this shape; drawn as 64-bit words, which saves a third of the time."""
    count = math.prod(shape)
    words = rng.integers(0, 2**64 - 1, -(-count // 8), dtype=np.uint64, endpoint=True)
    return words.astype("<u8", copy=False).view(np.uint8)[:count].reshape(shape)
