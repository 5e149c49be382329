"""Inputs of figures that were made with the authors' code: normal numbers, float64."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Standard normal numbers times ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def bits(seed: int, *shape: int, share: float) -> Tensor:
    """Booleans that are true below the quantile ``share`` of normal numbers."""
    values = draw(seed, *shape)
    return values < values.flatten().sort().values[int(share * values.numel())]
