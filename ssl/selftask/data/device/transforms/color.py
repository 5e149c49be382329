"""Batched grayscale and solarize."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import (
    Arrays,
    RandomlyApplied,
    Tensors,
    UniformOperation,
    per_image,
)
from selftask.data.transforms.color import LUMA
from selftask.registry import register_batched_transform


@register_batched_transform("grayscale")
class BatchedGrayscale(RandomlyApplied):
    """Grayscale: luma in all channels."""

    def change(self, values: Tensor) -> Tensor:
        return luma(values).round_()


@register_batched_transform("solarize")
class BatchedSolarize(UniformOperation):
    """Solarize: invert the values that are at least the threshold."""

    reads = ()

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        never = 256
        threshold = np.where(chosen, self.transform.threshold, never)
        return {"threshold": np.broadcast_to(threshold, len(sizes))}

    def apply(self, values: Tensor, packed: Tensors, sizes: Tensor | None) -> Tensor:
        return torch.where(values >= per_image(packed["threshold"]), 255 - values, values)


def luma(values: Tensor) -> Tensor:
    """Return the luma (B, 1, H, W) of (B, C, H, W), not rounded; the channel mean if C is not 3."""
    if values.shape[1] != len(LUMA):
        return values.mean(1, keepdim=True)
    red, green, blue = values.split(1, 1)
    return torch.lerp(red, green, LUMA[1] / (LUMA[0] + LUMA[1])).lerp_(blue, LUMA[2])
