"""Interpolation of a vision transformer's position embeddings to another grid of patches."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from selftask.models.features.tokens import resample


def interpolate_positions(module: nn.Module, key: str, positions: Tensor) -> Tensor | None:
    """Resize the positions of a pretrained transformer to the grid of ``module``.

    The interpolation is bicubic with antialiasing, as when timm loads its own weights. Positions of
    prefix tokens are unchanged.

    Args:
        module: A VisionTransformer of timm or torchvision.
        key: Name of the positions in its state dict.
        positions: (1, T + N, E), for T prefix tokens and a square grid of N patches.

    Returns:
        The positions for the module's grid, (1, T + M, E). None if ``key`` is not the module's
        positions, the grid is not square, or the width E is another one.
    """
    grid = _grid(module)
    if grid is None or key not in ("pos_embed", "encoder.pos_embedding"):
        return None
    wanted = module.state_dict()[key]  # (1, T + M, E)
    num_prefix = wanted.shape[1] - math.prod(grid)
    side = math.isqrt(max(0, positions.shape[1] - num_prefix)) if positions.ndim == 3 else 0
    if side == 0 or side**2 + num_prefix != positions.shape[1]:
        return None
    if positions.shape[2] != wanted.shape[2]:
        return None
    return resample(positions, (side, side), grid, num_prefix=num_prefix)


def _grid(module: Any) -> tuple[int, int] | None:
    """Return rows and columns of patches, for transformers of timm and torchvision."""
    patches = getattr(module, "patch_embed", None)
    if patches is not None and getattr(patches, "grid_size", None):
        rows, columns = patches.grid_size
        return rows, columns
    if hasattr(module, "conv_proj") and hasattr(module, "image_size"):
        side = module.image_size // module.patch_size
        return side, side
    return None
