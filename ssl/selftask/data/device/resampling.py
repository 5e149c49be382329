"""Resampling by two matrices for each image, one for its columns and one for its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from selftask.distributed.accelerator import is_accelerator


def filter_matrix(
    start: Tensor,
    length: Tensor,
    num_out: Tensor | int,
    shape: tuple[int, int],
    interpolation: str,
) -> Tensor:
    """Return weights that resample ``length`` inputs to ``num_out`` outputs.

    The filter is Pillow's: it becomes wider if the image shrinks. Weights outside the crop are set
    to zero, and the others are scaled up to sum to 1.

    Args:
        start: Index of the first input of each crop, (B,).
        length: Number of inputs of each crop, (B,).
        num_out: Number of outputs, one for all images or (B,).
        shape: Shape (O, I) of each matrix: at least the largest ``num_out``, and the number of
            inputs.
        interpolation: ``bilinear``, ``bicubic`` or ``nearest``.

    Returns:
        float32 (B, O, I); rows from ``num_out`` on are zero.
    """
    outs = torch.arange(shape[0], device=start.device, dtype=torch.float32)
    ins = torch.arange(shape[1], device=start.device, dtype=torch.float32)
    if interpolation == "nearest":
        nearest = start[:, None] + _nearest(length, num_out, shape[0])
        weights = (ins == nearest[:, :, None]).float()
    else:
        scale = length / num_out
        widen = 1 / scale.clamp(min=1)  # (B,)
        centres = (outs + 0.5) * (scale * widen)[:, None]  # (B, O), in widths of the filter
        places = (ins + (0.5 - start)[:, None]).mul_(widen[:, None])  # (B, I), from the crop's edge
        inside = (places > 0) & (places < (length * widen)[:, None])
        places = torch.where(inside, places, 1e6)  # beyond any filter
        distance = (places[:, None, :] - centres[:, :, None]).abs_()
        weights = _triangle(distance) if interpolation == "bilinear" else _cubic(distance)
        weights = weights.div_(weights.sum(2, keepdim=True))
    if isinstance(num_out, int):
        return weights
    return torch.where((outs < num_out[:, None])[:, :, None], weights, 0.0)


def _nearest(length: Tensor, num_out: Tensor | int, size: int) -> Tensor:
    """Return the nearest of ``length`` inputs for each of ``size`` outputs, (B, size).

    Of two equally near inputs, it is the later one. OpenCV, which uses fixed-point numbers, takes
    either.
    """
    outs = torch.arange(size, device=length.device)
    wanted = num_out if isinstance(num_out, int) else num_out[:, None].long()
    return (2 * outs + 1) * length[:, None].long() // (2 * wanted)


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
