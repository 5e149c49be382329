"""Flips, rotations and affine maps; each resamples the image once at most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from selftask.data.transforms.crops import RESAMPLING
from selftask.registry import register_transform


@register_transform("horizontal_flip")
@dataclass(frozen=True, kw_only=True)
class HorizontalFlip:
    """Left becomes right, with probability p."""

    p: float = 0.5

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 <= self.p <= 1:
            yield f"p: {self.p}; a probability is expected"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        flip = rng.random() < self.p
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image


@register_transform("vertical_flip")
@dataclass(frozen=True, kw_only=True)
class VerticalFlip:
    """Up becomes down, with probability p."""

    p: float = 0.5

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 <= self.p <= 1:
            yield f"p: {self.p}; a probability is expected"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        flip = rng.random() < self.p
        return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if flip else image


@register_transform("rotation")
@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Turn about the centre by up to ``degrees`` either way; the size stays."""

    degrees: float
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    fill: int = 0  # grey level of what comes from outside

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        angle = self.degrees * (2 * rng.random() - 1)
        return image.rotate(angle, RESAMPLING[self.interpolation], fillcolor=(self.fill,) * 3)


@register_transform("random_affine")
@dataclass(frozen=True, kw_only=True)
class RandomAffine:
    """Random rotation, scale and shift in a single resampling.

    torchvision's RandomAffine without shear, except that shifts are not rounded to whole pixels.
    """

    degrees: float = 0.0  # rotation by up to this, either way
    scale: tuple[float, float] = (1.0, 1.0)
    shift: float = 0.0  # by up to this fraction of the width and of the height, either way
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    fill: int = 0  # grey level of what comes from outside

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 < self.scale[0] <= self.scale[1]:
            yield f"scale: {list(self.scale)}; 0 < least <= largest is expected"
        if not 0 <= self.shift <= 1:
            yield f"shift: {self.shift}; a fraction of the image, from 0 to 1, is expected"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        angle, scale, right, down = rng.random(4).tolist()
        matrix = inverse_affine(
            image.size,
            self.degrees * (2 * angle - 1),
            self.scale[0] + (self.scale[1] - self.scale[0]) * scale,
            (
                image.size[0] * self.shift * (2 * right - 1),
                image.size[1] * self.shift * (2 * down - 1),
            ),
        )
        return image.transform(
            image.size,
            Image.Transform.AFFINE,
            matrix,
            RESAMPLING[self.interpolation],
            fillcolor=(self.fill,) * 3,
        )


def inverse_affine(
    size: tuple[int, int], degrees: float, scale: float, shift: tuple[float, float]
) -> tuple[float, ...]:
    """The 2x3 matrix, row by row, that takes output to input coordinates.

    Forward: turn clockwise by ``degrees`` about the centre and scale, then shift by pixels.
    """
    centre_x, centre_y = size[0] / 2, size[1] / 2
    cos = math.cos(math.radians(degrees)) / scale
    sin = math.sin(math.radians(degrees)) / scale
    from_x, from_y = centre_x + shift[0], centre_y + shift[1]
    return (
        *(cos, sin, centre_x - cos * from_x - sin * from_y),
        *(-sin, cos, centre_y + sin * from_x - cos * from_y),
    )
