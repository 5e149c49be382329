"""Resampling by two matrices for each image, one for its columns and one for its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from selftask.distributed.accelerator import is_accelerator


def filter_matrix(
    start: Tensor, length: Tensor, num_out: int, num_in: int, interpolation: str
) -> Tensor:
    """Return weights that resample ``length`` inputs to ``num_out`` outputs.

    The filter is Pillow's: it becomes wider if the image shrinks. Weights outside the crop are set
    to zero, and the others are scaled up to sum to 1.

    Args:
        start: Index of the first input of each crop, (B,).
        length: Number of inputs of each crop, (B,).
        num_out: Number of outputs, O.
        num_in: Number of inputs, I.
        interpolation: ``bilinear``, ``bicubic`` or ``nearest``.

    Returns:
        float32 (B, O, I).
    """
    outs = torch.arange(num_out, device=start.device, dtype=torch.float32)
    ins = torch.arange(num_in, device=start.device, dtype=torch.float32)
    if interpolation == "nearest":  # of two equally near inputs, the later; OpenCV takes either
        nearest = start[:, None] + (2 * outs + 1) * length[:, None] // (2 * num_out)
        return (ins == nearest[:, :, None]).float()
    scale = length / num_out
    widen = 1 / scale.clamp(min=1)  # (B,)
    centers = (outs + 0.5) * (scale * widen)[:, None]  # (B, O), in widths of the filter
    positions = (ins + (0.5 - start)[:, None]).mul_(widen[:, None])  # (B, I), from the crop's edge
    inside = (positions > 0) & (positions < (length * widen)[:, None])
    positions = torch.where(inside, positions, 1e6)  # beyond any filter
    distance = (positions[:, None, :] - centers[:, :, None]).abs_()
    weights = _triangle(distance) if interpolation == "bilinear" else _cubic(distance)
    return weights.div_(weights.sum(2, keepdim=True))


def _triangle(distance: Tensor) -> Tensor:
    return distance.neg_().add_(1).clamp_(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Pillow's cubic filter, with a = -0.5."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def resample(
    values: Tensor, down: Tensor, across: Tensor, kind: torch.dtype | None = None
) -> Tensor:
    """Multiply images by a matrix for their rows and one for their columns.

    Args:
        values: (B, C, H, W).
        down: (B, H', H).
        across: (B, W', W).
        kind: Type of the products. The default on an accelerator is float16: with tensor cores this
            becomes the cheapest operation instead of the most expensive one. The 11 bits of float16
            hold whole levels exactly, and the result is within half a level. Elsewhere, the default
            is the type of ``values``.

    Returns:
        float32 (B, C, H', W').
    """
    if kind is None:
        kind = torch.float16 if is_accelerator(values.device) else values.dtype
    batch, channels, height, _ = values.shape
    rows = values.to(kind).flatten(1, 2) @ across.to(kind).mT  # (B, C * H, W')
    planes = rows.view(batch, channels, height, -1)
    return torch.matmul(down.to(kind)[:, None], planes).float()
