"""Batched flips."""

from __future__ import annotations

from torch import Tensor

from selftask.data.device.operation import RandomlyApplied
from selftask.registry import register_batched_transform


@register_batched_transform("horizontal_flip")
class BatchedHorizontalFlip(RandomlyApplied):
    """Flip randomly drawn images of a batch from left to right."""

    def change(self, values: Tensor) -> Tensor:
        return values.flip(3)


@register_batched_transform("vertical_flip")
class BatchedVerticalFlip(RandomlyApplied):
    """Flip randomly drawn images of a batch upside down."""

    def change(self, values: Tensor) -> Tensor:
        return values.flip(2)
