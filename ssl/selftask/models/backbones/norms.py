"""Normalization layers of ResNets by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from selftask.config.fields import setting


class GhostBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm of (B, C, H, W) with separate statistics for parts of the batch (arXiv:1705.08741).

    In training, a batch is split into parts of at least ``size`` samples. Each part updates the
    running statistics. In eval mode it is equal to ``nn.BatchNorm2d``, whose state dict it shares.

    Args:
        channels: Channels of the maps.
        size: Samples in a part; a smaller batch is one part.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels)
        self.size = size

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        parts = input.tensor_split(max(1, len(input) // self.size))
        return torch.cat([super(GhostBatchNorm2d, self).forward(part) for part in parts])


@dataclass(frozen=True, kw_only=True)
class WithNorm:
    """Config of a backbone whose normalization can be chosen."""

    norm: Literal["batch", "group", "ghost", "frozen"] = setting("batch", also=["norm_layer"])
    """Normalization: batch, group, ghost (BatchNorm over parts of the batch), or frozen (the
    statistics and scales of the weights in ``init``, never updated).
    """
    norm_size: int = setting(32, min=1, also=["num_groups"])
    """Number of groups for ``norm=group``, reduced if it does not divide the channels; samples in a
    part for ``norm=ghost``.
    """

    def norm_layer(self, channels: int) -> nn.Module:
        """Return a normalization layer of maps (B, ``channels``, H, W)."""
        if self.norm == "group":
            return nn.GroupNorm(math.gcd(self.norm_size, channels), channels)
        if self.norm == "ghost":
            return GhostBatchNorm2d(channels, self.norm_size)
        if self.norm == "frozen":
            from torchvision.ops import FrozenBatchNorm2d  # slow to import

            return FrozenBatchNorm2d(channels)
        return nn.BatchNorm2d(channels)
