"""Flips, rotations and affine maps; each resamples the image at most once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.kernel import Op
from selftask.data.transforms.channels import by_groups
from selftask.data.transforms.resampling import warp
from selftask.data.transforms.transform import Matrix, Resampled, Toggled, UniformTransform
from selftask.registry import register_transform


@register_transform("horizontal_flip")
class HorizontalFlip(Toggled):
    """Flip the image from left to right, with probability p."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return by_groups(lambda part: cv2.flip(part, 1), image)

    def program(self, params: Any) -> Sequence[float]:
        return (Op.HFLIP,)

    def source_matrix(self, params: Any, height: int, width: int) -> Matrix:
        return -1.0, 0.0, width, 0.0, 1.0, 0.0


@register_transform("vertical_flip")
class VerticalFlip(Toggled):
    """Flip the image upside down, with probability p."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return by_groups(lambda part: cv2.flip(part, 0), image)

    def source_matrix(self, params: Any, height: int, width: int) -> Matrix:
        return 1.0, 0.0, 0.0, 0.0, -1.0, height


@dataclass(frozen=True, kw_only=True)
class RandomMatrix(UniformTransform, Resampled):
    """Base class of affine maps; parameters are the matrix from output to input coordinates."""

    def apply(self, image: np.ndarray, params: Matrix) -> np.ndarray:
        return warp(image, params, self.interpolation, self.fill)

    def source_matrix(self, params: Matrix, height: int, width: int) -> Matrix:
        return params


@register_transform("rotation")
@dataclass(frozen=True, kw_only=True)
class Rotation(RandomMatrix):
    """Rotate about the center by a random angle of up to ``degrees``; the image size is kept."""

    num_uniforms: ClassVar[int] = 1

    degrees: float = setting(min=0, max=360)
    """Largest angle in either direction, in degrees."""

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return True, and the matrix (2x3, row by row) from output to input coordinates.

        Positive angles are counterclockwise.
        """
        angle = self.degrees * (2 * uniforms[0] - 1)
        return True, inverse_affine((width, height), -angle, 1.0, (0.0, 0.0), xp)

    def numbers(self, params: Matrix | None) -> Sequence[float]:
        """Return the counterclockwise angle in degrees, from -180 to 180."""
        return (math.degrees(math.atan2(-params[1], params[0])) if params else 0.0,)


@register_transform("random_affine")
@dataclass(frozen=True, kw_only=True)
class RandomAffine(RandomMatrix):
    """Rotate, scale and translate randomly, in a single resampling.

    Like torchvision's RandomAffine without shear, but translations are not rounded to whole pixels.
    """

    num_uniforms: ClassVar[int] = 4

    degrees: float = setting(0.0, min=0, max=360)
    """Largest angle in either direction, in degrees."""
    scale: tuple[float, float] = setting((1.0, 1.0), above=0, rising=True)
    """Range of the scaling factor."""
    translate: float = setting(0.0, min=0, max=1)
    """Largest translation in either direction, as a fraction of the width and of the height."""

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return True, and the matrix (2x3, row by row) from output to input coordinates."""
        angle, scale, right, down = uniforms
        return True, inverse_affine(
            (width, height),
            self.degrees * (2 * angle - 1),
            self.scale[0] + (self.scale[1] - self.scale[0]) * scale,
            (width * self.translate * (2 * right - 1), height * self.translate * (2 * down - 1)),
            xp,
        )


def inverse_affine(
    size: tuple[Any, Any], degrees: Any, scale: Any, shift: tuple[Any, Any], xp: Any
) -> tuple[Any, ...]:
    """Return the inverse of an affine map as a matrix (2x3, row by row).

    The map rotates, scales and translates; its inverse maps output to input coordinates. All
    arguments but ``xp`` are numbers, or arrays for a batch.

    Args:
        size: Width and height, in pixels.
        degrees: Clockwise rotation about the center.
        scale: Scaling about the center.
        shift: Translation after rotation and scaling, to the right and down, in pixels.
        xp: Math functions: ``SCALARS`` for numbers, NumPy for arrays.
    """
    center_x, center_y = size[0] / 2, size[1] / 2
    cos = xp.cos(xp.radians(degrees)) / scale
    sin = xp.sin(xp.radians(degrees)) / scale
    from_x, from_y = center_x + shift[0], center_y + shift[1]
    return (
        *(cos, sin, center_x - cos * from_x - sin * from_y),
        *(-sin, cos, center_y + sin * from_x - cos * from_y),
    )
