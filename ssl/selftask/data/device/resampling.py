"""Resampling by two matrices for each image, one for its columns and one for its rows."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from selftask.distributed.accelerator import is_accelerator


def filter_matrix(
    start: Tensor, length: Tensor, num_out: int, num_in: int, interpolation: str
) -> Tensor:
    """Return weights that resample ``length`` inputs to ``num_out`` outputs.

    The filter is Pillow's: it becomes wider if the image shrinks, except for ``nearest``. Weights
    outside the crop are zero, and those of an output sum to 1.

    Args:
        start: Index of the first input of each crop, (...).
        length: Number of inputs of each crop, (...).
        num_out: Number of outputs, O.
        num_in: Number of inputs, I.
        interpolation: ``bilinear``, ``bicubic`` or ``nearest``.

    Returns:
        float32 (..., O, I).
    """
    start, length = start[..., None], length[..., None]
    outs, ins = _middles(num_out, start.device), _middles(num_in, start.device)
    if interpolation == "nearest":  # of two equally near inputs, the later; OpenCV takes either
        nearest = start + 0.5 + outs * length // num_out
        return (ins == nearest[..., None]).float()
    scale = length / num_out
    widen = scale.clamp(min=1).reciprocal_()
    centers = outs * (scale * widen)  # (..., O), in widths of the filter
    positions = ins - start  # (..., I), from the crop's edge
    inside = (positions > 0) & (positions < length)
    positions = torch.where(inside, positions, 1e6).mul_(widen)  # 1e6: beyond any filter
    distance = (positions[..., None, :] - centers[..., None]).abs_()
    weights = _triangle(distance) if interpolation == "bilinear" else _cubic(distance)
    return weights.div_(weights.sum(-1, keepdim=True))


@cache
def _middles(count: int, device: torch.device) -> Tensor:
    """Return the centers of ``count`` pixels: 0.5, 1.5, and so on."""
    return torch.arange(count, device=device, dtype=torch.float32).add_(0.5)


def _triangle(distance: Tensor) -> Tensor:
    return distance.neg_().add_(1).clamp_(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Return the weights of Pillow's cubic filter, with a = -0.5; overwrites ``distance``.

    With f = max(0, 2 - distance) and e = max(0, f - 1), a weight is f^2 (f - 1) / 2 + e^2 - 2 e^3.
    """
    far = distance.neg_().add_(2).clamp_(min=0)
    near = far - 1
    far.square_().mul_(near)
    square = near.clamp_(min=0).square()
    return square.addcmul_(square, near, value=-2).add_(far, alpha=0.5)


def resample(
    values: Tensor, down: Tensor, across: Tensor, kind: torch.dtype | None = None
) -> Tensor:
    """Multiply images by a matrix for their rows and one for their columns.

    Args:
        values: (B, C, H, W).
        down: (B * n, H', H): the first n matrices are for the first image, and so on.
        across: (B * n, W', W).
        kind: Dtype of the products. The default on an accelerator is float16: tensor cores make
            resampling the cheapest augmentation instead of the most expensive one. float16
            represents integer gray levels exactly, and the error of the result is at most half a
            level. Elsewhere, the default is the dtype of ``values``.

    Returns:
        float32 (B * n, C, H', W').
    """
    if kind is None:
        kind = torch.float16 if is_accelerator(values.device) else values.dtype
    batch, channels, height, _ = values.shape
    results, new_height, _ = down.shape
    same = across is down
    down = down.to(kind)
    across = down if same else across.to(kind)
    by_row = _converted(values.transpose(1, 2), kind).flatten(2)
    rows = down.reshape(batch, -1, height) @ by_row  # (B, n * H', C * W)
    planes = rows.view(results, new_height * channels, -1) @ across.mT
    planes = planes.view(results, new_height, channels, -1).transpose(1, 2)
    return _converted(planes, torch.float32)


def _converted(values: Tensor, kind: torch.dtype) -> Tensor:
    """Return contiguous values of dtype ``kind``, copied at most once."""
    return values.to(kind, memory_format=torch.contiguous_format).contiguous()
