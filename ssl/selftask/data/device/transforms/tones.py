"""Batched equalize, autocontrast and sharpness."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import (
    Arrays,
    Images,
    RandomlyApplied,
    Tensors,
    UniformOperation,
    on_chosen,
    per_image,
    to_levels,
)
from selftask.data.transforms.tones import Sharpness
from selftask.registry import register_batched_transform


@register_batched_transform("equalize")
class BatchedEqualize(RandomlyApplied):
    """Equalize the histogram of each channel."""

    def change(self, values: Tensor) -> Tensor:
        return equalize(values)


@register_batched_transform("autocontrast")
class BatchedAutocontrast(RandomlyApplied):
    """Stretch each channel to 0..255."""

    def change(self, values: Tensor) -> Tensor:
        return autocontrast(values)


@register_batched_transform("sharpness")
class BatchedSharpness(UniformOperation):
    """Sharpen or smooth each image by its factor."""

    transform: Sharpness

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        return {"factor": params, "chosen": chosen}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return on_chosen(images, packed["chosen"], sharpen, packed["factor"])


def equalize(values: Tensor) -> Tensor:
    """Equalize the histogram of each channel, with Pillow's tables and integers only."""
    levels = values.flatten(2).long()  # (B, C, H * W)
    counts = levels.new_zeros((*levels.shape[:2], 256))
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    present = (counts > 0).long()
    steps = torch.arange(256, device=values.device)
    last = (present * steps).argmax(2, keepdim=True)  # the highest value present
    step = (levels.shape[2] - counts.gather(2, last)) // 255
    step = torch.where(present.sum(2, keepdim=True) > 1, step, 0)
    below = counts.cumsum(2) - counts
    flat = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return _look_up(levels, torch.where(step > 0, flat, steps)).view(values.shape)


def autocontrast(values: Tensor) -> Tensor:
    """Stretch each channel to 0..255; tables are float64 because they are rounded down."""
    low, high = (of(values.flatten(2), 2, keepdim=True).double() for of in (torch.amin, torch.amax))
    stretched = high > low
    scale = torch.where(stretched, 255 / (high - low).clamp(min=1), 1.0)
    offset = torch.where(stretched, -low * scale, 0.0)
    tables = torch.arange(256, device=values.device) * scale + offset  # (B, C, 256)
    levels = values.flatten(2).long()
    return _look_up(levels, tables.clamp_(0, 255).floor_()).view(values.shape)


def _look_up(levels: Tensor, tables: Tensor) -> Tensor:
    """Apply a table (B, C, 256) to levels int64 (B, C, N); returns float32."""
    return tables.float().gather(2, levels)


def sharpen(values: Tensor, factor: Tensor) -> Tensor:
    """Sharpen (factor above 1) or smooth (below 1) each image in place; ``factor`` is (B,)."""
    if min(values.shape[2:]) < 3:
        return values  # all pixels are border pixels, which are kept
    middle = values[:, :, 1:-1, 1:-1]
    smooth = per_image((1 - factor) / 13)
    rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
    mean = (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]).mul_(1 / 9).round_()
    changed = mean.mul_(9 * smooth).add_(middle * (per_image(factor) + 4 * smooth))
    middle.copy_(to_levels(changed))
    return values
