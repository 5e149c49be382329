"""Crops and resizing, with torchvision's names and semantics; resizing is antialiased.

Images of three channels are resized by the compiled kernel, and batches on the device by
multiplication with two matrices (``data/device/resampling``). ``resampling.resize`` is for all
other cases: the matrices would take 20 to 100 times as long for one image on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.kernel import MAX_SIDE, Filter, Op
from selftask.data.transforms.boxes import Box, first_fit, random_box
from selftask.data.transforms.channels import by_groups
from selftask.data.transforms.resampling import resize
from selftask.data.transforms.transform import Deterministic, Matrix, Transform, UniformTransform
from selftask.registry import register_transform

_FILTERS = {"bilinear": Filter.BILINEAR, "bicubic": Filter.BICUBIC}


@register_transform("random_resized_crop")
@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(Transform):
    """Crop a random area with a random aspect ratio, and resize it to a square."""

    resizes = "square"

    size: int = setting(min=1)
    """Height and width, in pixels."""
    scale: tuple[float, float] = setting((0.08, 1.0), above=0, max=1, rising=True)
    """Range of the crop's area, as a fraction of the image's area."""
    ratio: tuple[float, float] = setting((0.75, 1.3333333333333333), above=0, rising=True)
    """Range of the crop's width / height, drawn log-uniformly."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    """Interpolation between pixels of the input; antialiased unless nearest."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Box:
        box: Box | None = first_fit(rng, height, width, self.attempt)
        return box or self.center_box(width, height)

    def attempt(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return whether a random box fits into the image, and the box; see ``boxes.Attempt``.

        Args:
            uniforms: Four numbers in [0, 1), or as many arrays (N,).
            height: Height of the image in pixels, a number or an array (N,).
            width: Width of the image in pixels, a number or an array (N,).
            xp: Math functions: ``SCALARS`` for numbers, NumPy for arrays.
        """
        left, top, w, h = random_box(uniforms, height, width, self.scale, self.ratio, xp)
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        return fits, (left, top, left + w, top + h)

    def apply(self, image: np.ndarray, params: Box) -> np.ndarray:
        left, top, right, bottom = params
        return resize(image[top:bottom, left:right], self.size, self.size, self.interpolation)

    def source_matrix(self, params: Box, height: int, width: int) -> Matrix:
        left, top, right, bottom = params
        return (right - left) / self.size, 0.0, left, 0.0, (bottom - top) / self.size, top

    def numbers(self, params: Box | None) -> Sequence[float]:
        """Return left, top, right and bottom of the crop, in pixels of the input image.

        NaN if the image is not cropped.
        """
        return params or (math.nan,) * 4

    def program(self, params: Box) -> Sequence[float] | None:
        left, top, right, bottom = params
        filter_ = _FILTERS.get(self.interpolation)
        if filter_ is None:
            return None
        width, height = right - left, bottom - top
        return (Op.CROP_RESIZE, left, top, width, height, self.size, self.size, filter_)

    def center_box(self, width: int, height: int) -> Box:
        """Return the largest centered box whose aspect ratio is within ``ratio``."""
        w, h = width, height
        if width / height < self.ratio[0]:
            h = min(height, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            w = min(width, round(height * self.ratio[1]))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


@register_transform("resize")
@dataclass(frozen=True, kw_only=True)
class Resize(Transform):
    """Resize the shorter side to ``size``, keeping the aspect ratio.

    The longer side is limited to 65,535 pixels. If the limit applies, the aspect ratio changes.
    """

    resizes = "shorter side"
    is_random = False

    size: int = setting(min=1)
    """Length of the shorter side, in pixels."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    """Interpolation between pixels of the input; antialiased unless nearest."""

    def draw(
        self, rng: np.random.Generator, height: int, width: int
    ) -> tuple[int, int, int, int] | None:
        """Return old height and width, then new height and width, in pixels.

        None if the shorter side has the right length already.
        """
        if min(height, width) == self.size:
            return None
        if width <= height:
            return height, width, min(MAX_SIDE, int(self.size * height / width)), self.size
        return height, width, self.size, min(MAX_SIDE, int(self.size * width / height))

    def apply(self, image: np.ndarray, params: tuple[int, int, int, int]) -> np.ndarray:
        return resize(image, *params[2:], self.interpolation)

    def source_matrix(self, params: tuple[int, int, int, int], height: int, width: int) -> Matrix:
        return width / params[3], 0.0, 0.0, 0.0, height / params[2], 0.0

    def program(self, params: tuple[int, int, int, int]) -> Sequence[float] | None:
        height, width, rows, columns = params
        filter_ = _FILTERS.get(self.interpolation)
        if filter_ is None:
            return None
        return (Op.CROP_RESIZE, 0, 0, width, height, rows, columns, filter_)


@register_transform("center_crop")
@dataclass(frozen=True, kw_only=True)
class CenterCrop(Deterministic):
    """Crop the central square; smaller images are padded with black first."""

    resizes = "square"

    size: int = setting(min=1)
    """Height and width, in pixels."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        image = _pad_to(image, self.size)
        top = round((image.shape[0] - self.size) / 2)
        left = round((image.shape[1] - self.size) / 2)
        return np.ascontiguousarray(image[top : top + self.size, left : left + self.size])

    def source_matrix(self, params: Any, height: int, width: int) -> Matrix:
        left, top = (
            round(max(0, side - self.size) / 2) - max(0, self.size - side) // 2
            for side in (width, height)
        )
        return 1.0, 0.0, left, 0.0, 1.0, top


@register_transform("random_crop")
@dataclass(frozen=True, kw_only=True)
class RandomCrop(UniformTransform):
    """Crop a square at a random position, after padding all sides with black.

    Images that are still smaller than the square are padded to its size.
    """

    num_uniforms: ClassVar[int] = 2

    resizes = "square"

    size: int = setting(min=1)
    """Height and width, in pixels."""
    padding: int = setting(0, min=0)
    """Padding on each side, in pixels; 4 for CIFAR."""

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return True and the pair (left, top) of the crop in the padded image."""
        across, down = uniforms
        room_x, room_y = (
            xp.maximum(0, side + 2 * self.padding - self.size) for side in (width, height)
        )
        return True, (xp.floor(across * (room_x + 1)), xp.floor(down * (room_y + 1)))

    def apply(self, image: np.ndarray, params: tuple[int, int]) -> np.ndarray:
        if self.padding:
            image = _pad(image, self.padding, self.padding, self.padding, self.padding)
        image = _pad_to(image, self.size)
        left, top = params
        return np.ascontiguousarray(image[top : top + self.size, left : left + self.size])

    def source_matrix(self, params: tuple[int, int], height: int, width: int) -> Matrix:
        left, top = (
            corner - self.padding - max(0, self.size - side - 2 * self.padding) // 2
            for corner, side in zip(params, (width, height), strict=True)
        )
        return 1.0, 0.0, left, 0.0, 1.0, top

    def numbers(self, params: tuple[int, int] | None) -> Sequence[float]:
        """Return left and top of the crop, in pixels of the padded image; NaN if not cropped."""
        return params or (math.nan,) * 2


def _pad_to(image: np.ndarray, size: int) -> np.ndarray:
    """Pad with black until each side has at least ``size`` pixels."""
    down, across = (max(0, size - side) for side in image.shape[:2])
    if not down and not across:
        return image
    return _pad(image, down // 2, down - down // 2, across // 2, across - across // 2)


def _pad(image: np.ndarray, top: int, bottom: int, left: int, right: int) -> np.ndarray:
    sides = top, bottom, left, right
    return by_groups(lambda part: cv2.copyMakeBorder(part, *sides, cv2.BORDER_CONSTANT), image)
