"""Batched flips, rotations and affine maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from selftask.data.device.operation import (
    Arrays,
    Images,
    Operation,
    RandomlyApplied,
    Tensors,
    on_chosen,
    to_levels,
)
from selftask.data.transforms.geometry import (
    HorizontalFlip,
    RandomAffine,
    Rotation,
    VerticalFlip,
)
from selftask.data.transforms.warps import RandomShear
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams


@register_batched_transform("horizontal_flip")
@register_batched_transform("vertical_flip")
class BatchedFlip(RandomlyApplied):
    """Columns or rows in reverse order."""

    ragged = True
    transform: HorizontalFlip | VerticalFlip

    def __init__(self, transform: HorizontalFlip | VerticalFlip) -> None:
        super().__init__(transform)
        self._axis = 3 if isinstance(transform, HorizontalFlip) else 2

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        if images.sizes is None:
            return super().apply(images, packed, canvas)
        ends = images.sizes[:, self._axis - 2]
        return on_chosen(images, packed["chosen"], self._flip_part, ends)

    def change(self, values: Tensor) -> Tensor:
        return values.flip(self._axis)

    def _flip_part(self, values: Tensor, ends: Tensor) -> Tensor:
        """Only the first ``ends`` (B,) rows or columns; what comes after them is no image."""
        last = (ends - 1)[:, None]
        places = (last - torch.arange(values.shape[self._axis], device=values.device)).clamp(min=0)
        at = places.long()
        at = at[:, None, :, None] if self._axis == 2 else at[:, None, None]
        return values.gather(self._axis, at.expand(values.shape))


@register_batched_transform("rotation")
@register_batched_transform("random_affine")
@register_batched_transform("random_shear")
class BatchedWarp(Operation):
    """Affine maps: each output pixel is read where its matrix says."""

    in_place = False
    transform: Rotation | RandomAffine | RandomShear

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        return {"matrix": np.array(params, dtype=np.float32)}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        height, width = sizes.T
        transform = self.transform
        if isinstance(transform, RandomShear):
            return {"matrix": _shear(transform, streams.random(2), sizes)}
        if isinstance(transform, Rotation):
            angle = -transform.degrees * (2 * streams.random(1)[:, 0] - 1)
            none = np.zeros(len(sizes))
            return {"matrix": _inverse_affine(width, height, angle, none + 1, none, none)}
        angle, scale, right, down = streams.random(4).T
        matrix = _inverse_affine(
            *(width, height, transform.degrees * (2 * angle - 1)),
            transform.scale[0] + (transform.scale[1] - transform.scale[0]) * scale,
            width * transform.translate * (2 * right - 1),
            height * transform.translate * (2 * down - 1),
        )
        return {"matrix": matrix}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return images.with_values(warped(images.values, packed["matrix"], self.transform))


def warped(values: Tensor, matrix: Tensor, transform: Any) -> Tensor:
    """Affine maps (B, 6) from output to input coordinates; ``transform`` says how to read."""
    x, y = pixel_centres(values)
    a, b, c, d, e, f = matrix[:, :, None].unbind(1)  # (B, 1) each
    at_x = (a * x + c)[:, None] + (b * y)[:, :, None]
    at_y = (d * x + f)[:, None] + (e * y)[:, :, None]
    return read_at(values, at_x, at_y, transform)


def pixel_centres(values: Tensor) -> tuple[Tensor, Tensor]:
    """(W,) and (H,) float32; the first is at 0.5."""
    x, y = (torch.arange(values.shape[axis], device=values.device) + 0.5 for axis in (3, 2))
    return x, y


def read_at(values: Tensor, x: Tensor, y: Tensor, transform: Any) -> Tensor:
    """(B, C, H, W) in whole levels: each pixel read at places (B, H, W) in pixels of ``values``.

    ``transform`` has the ``interpolation`` and the ``fill`` for what is outside.
    """
    height, width = values.shape[2:]
    grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], 3)
    fill, mode = transform.fill, transform.interpolation
    moved = grid_sample(values - fill, grid, mode, "zeros", align_corners=False).add_(fill)
    return to_levels(moved)


def _shear(shear: RandomShear, draws: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """RandomShear.draw for (N, 2) draws: (N, 6) float32."""
    x, y = (2 * draws - 1).T * (math.pi / 180)
    across, down = np.tan(shear.x * x), np.tan(shear.y * y)
    a, b, c, d = 1 + across * down, across, down, np.ones(len(draws))
    top, left = sizes.T / 2
    rows = (a, b, left - a * left - b * top, c, d, top - c * left - d * top)
    return np.stack(rows, axis=1).astype(np.float32)


def _inverse_affine(
    width: np.ndarray,
    height: np.ndarray,
    degrees: np.ndarray,
    scale: np.ndarray,
    right: np.ndarray,
    down: np.ndarray,
) -> np.ndarray:
    """transforms.geometry.inverse_affine for N images: (N, 6) float32."""
    centre_x, centre_y = width / 2, height / 2
    cos, sin = (f(degrees * (math.pi / 180)) / scale for f in (np.cos, np.sin))
    from_x, from_y = centre_x + right, centre_y + down
    rows = (
        *(cos, sin, centre_x - cos * from_x - sin * from_y),
        *(-sin, cos, centre_y + sin * from_x - cos * from_y),
    )
    return np.stack(rows, axis=1).astype(np.float32)
