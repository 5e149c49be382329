"""Batched grayscale and solarize."""

from __future__ import annotations

import torch
from torch import Tensor

from selftask.data.device.operation import RandomlyApplied
from selftask.data.transforms.color import LUMA
from selftask.registry import register_batched_transform


@register_batched_transform("grayscale")
class BatchedGrayscale(RandomlyApplied):
    """Grayscale: luma in all channels."""

    def change(self, values: Tensor) -> Tensor:
        return luma(values).round_().expand_as(values)


@register_batched_transform("solarize")
class BatchedSolarize(RandomlyApplied):
    """Solarize: invert the values that are at least the threshold."""

    def change(self, values: Tensor) -> Tensor:
        return torch.where(values >= self.transform.threshold, 255 - values, values)


def luma(values: Tensor) -> Tensor:
    """Return the luma (B, 1, H, W) of (B, C, H, W), not rounded; the mean if C is not 3."""
    if values.shape[1] != len(LUMA):
        return values.mean(1, keepdim=True)
    red, green, blue = values.unbind(1)
    return red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])[:, None]
