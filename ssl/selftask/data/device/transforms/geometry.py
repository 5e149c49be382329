"""Batched flips, rotations and affine maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from selftask.data.device.operation import (
    Arrays,
    Images,
    RandomlyApplied,
    Tensors,
    UniformOperation,
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


@register_batched_transform("horizontal_flip")
@register_batched_transform("vertical_flip")
class BatchedFlip(RandomlyApplied):
    """Horizontal and vertical flips."""

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
        """Flip only the first ``ends`` (B,) rows or columns, which hold the image."""
        last = (ends - 1)[:, None]
        places = (last - torch.arange(values.shape[self._axis], device=values.device)).clamp(min=0)
        at = places.long()
        at = at[:, None, :, None] if self._axis == 2 else at[:, None, None]
        return values.gather(self._axis, at.expand(values.shape))


@register_batched_transform("rotation")
@register_batched_transform("random_affine")
@register_batched_transform("random_shear")
class BatchedWarp(UniformOperation):
    """Affine maps of ``rotation``, ``random_affine`` and ``random_shear``."""

    in_place = False
    transform: Rotation | RandomAffine | RandomShear

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        columns = [np.broadcast_to(one, len(sizes)) for one in params]
        return {"matrix": np.stack(columns, axis=1)}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return images.with_values(warped(images.values, packed["matrix"], self.transform))


def warped(values: Tensor, matrix: Tensor, transform: Any) -> Tensor:
    """Apply affine maps (B, 6) from output to input coordinates.

    ``transform`` provides ``interpolation``, and ``fill`` for pixels outside the image.
    """
    x, y = pixel_centres(values)
    a, b, c, d, e, f = matrix[:, :, None].unbind(1)  # (B, 1) each
    at_x = (a * x + c)[:, None] + (b * y)[:, :, None]
    at_y = (d * x + f)[:, None] + (e * y)[:, :, None]
    return read_at(values, at_x, at_y, transform)


def pixel_centres(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (W,) and y (H,) of the pixel centers, float32; the first is at 0.5."""
    x, y = (torch.arange(values.shape[axis], device=values.device) + 0.5 for axis in (3, 2))
    return x, y


def read_at(values: Tensor, x: Tensor, y: Tensor, transform: Any) -> Tensor:
    """Sample each image at coordinates (B, H, W) in pixels; returns whole levels (B, C, H, W).

    ``transform`` provides ``interpolation``, and ``fill`` for pixels outside the image.
    """
    height, width = values.shape[2:]
    grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], 3)
    fill, mode = transform.fill, transform.interpolation
    moved = grid_sample(values - fill, grid, mode, "zeros", align_corners=False).add_(fill)
    return to_levels(moved)
