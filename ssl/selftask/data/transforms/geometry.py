"""Flips, rotations and affine maps; each resamples the image once at most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.kernel import Op
from selftask.data.transforms.channels import by_groups
from selftask.data.transforms.resampling import warp
from selftask.data.transforms.transform import Matrix, RandomlyApplied, Transform
from selftask.registry import register_transform


@register_transform("horizontal_flip")
@dataclass(frozen=True, kw_only=True)
class HorizontalFlip(RandomlyApplied):
    """Left becomes right, with probability p."""

    p: float = setting(0.5, min=0, max=1)

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return by_groups(lambda part: cv2.flip(part, 1), image)

    def program(self, params: Any) -> Sequence[float]:
        return (Op.HFLIP,)

    def source_matrix(self, params: Any, height: int, width: int) -> Matrix:
        return -1.0, 0.0, width, 0.0, 1.0, 0.0


@register_transform("vertical_flip")
@dataclass(frozen=True, kw_only=True)
class VerticalFlip(RandomlyApplied):
    """Up becomes down, with probability p."""

    p: float = setting(0.5, min=0, max=1)

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return by_groups(lambda part: cv2.flip(part, 0), image)

    def source_matrix(self, params: Any, height: int, width: int) -> Matrix:
        return 1.0, 0.0, 0.0, 0.0, -1.0, height


@register_transform("rotation")
@dataclass(frozen=True, kw_only=True)
class Rotation(Transform):
    """Turn about the centre by up to ``degrees`` either way; the size stays."""

    degrees: float = setting(min=0, max=360)
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    fill: int = setting(0, min=0, max=255)  # grey level of what comes from outside

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Matrix:
        """From output to input coordinates; anticlockwise for a positive angle."""
        angle = self.degrees * (2 * rng.random() - 1)
        return inverse_affine((width, height), -angle, 1.0, (0.0, 0.0))

    def apply(self, image: np.ndarray, params: Matrix) -> np.ndarray:
        return warp(image, params, self.interpolation, self.fill)

    def source_matrix(self, params: Matrix, height: int, width: int) -> Matrix:
        return params

    def numbers(self, params: Matrix | None) -> Sequence[float]:
        """Degrees, anticlockwise."""
        return (math.degrees(math.atan2(-params[1], params[0])) if params else 0.0,)


@register_transform("random_affine")
@dataclass(frozen=True, kw_only=True)
class RandomAffine(Transform):
    """Random rotation, scale and shift in a single resampling.

    torchvision's RandomAffine without shear, except that shifts are not rounded to whole pixels.
    """

    degrees: float = setting(0.0, min=0, max=360)  # rotation by up to this, either way
    scale: tuple[float, float] = (1.0, 1.0)
    # by up to this fraction of the width and of the height, either way
    translate: float = setting(0.0, min=0, max=1)
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    fill: int = setting(0, min=0, max=255)  # grey level of what comes from outside

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 < self.scale[0] <= self.scale[1]:
            yield f"scale: {list(self.scale)}; 0 < least <= largest is expected"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Matrix:
        """From output to input coordinates."""
        angle, scale, right, down = rng.random(4).tolist()
        return inverse_affine(
            (width, height),
            self.degrees * (2 * angle - 1),
            self.scale[0] + (self.scale[1] - self.scale[0]) * scale,
            (width * self.translate * (2 * right - 1), height * self.translate * (2 * down - 1)),
        )

    def apply(self, image: np.ndarray, params: Matrix) -> np.ndarray:
        return warp(image, params, self.interpolation, self.fill)

    def source_matrix(self, params: Matrix, height: int, width: int) -> Matrix:
        return params


def inverse_affine(
    size: tuple[int, int], degrees: float, scale: float, shift: tuple[float, float]
) -> Matrix:
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
