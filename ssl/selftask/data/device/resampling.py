"""Resampling as matrices: one for the columns and one for the rows of each picture."""

from __future__ import annotations

import torch
from torch import Tensor

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "nearest": 0.5}


def filter_matrix(
    start: Tensor, length: Tensor, num_out: Tensor, shape: tuple[int, int], interpolation: str
) -> Tensor:
    """Weights (B, O, I) that make ``num_out`` samples of ``length`` ones, from ``start`` on.

    start, length, num_out are (B,); ``shape`` is (O, I), at least as large as any of them. The
    filter is Pillow's: it widens when it shrinks, and where it reaches beyond the crop (which may
    be a part of the picture) its other weights make up for it. Rows beyond ``num_out`` are zero.
    """
    outs = torch.arange(shape[0], device=start.device, dtype=torch.float32)
    ins = torch.arange(shape[1], device=start.device, dtype=torch.float32)
    scale = length / num_out
    if interpolation == "nearest":
        nearest = start[:, None] + _nearest(length, num_out, shape[0])
        weights = (ins == nearest[:, :, None]).float()
    else:
        centre = torch.addcmul(start[:, None], outs + 0.5, scale[:, None])  # (B, O)
        widen = 1 / scale.clamp(min=1)  # (B,)
        places = ins[None] + (0.5 - start)[:, None]  # (B, I), from the crop's first edge on
        inside = (places > 0) & (places < length[:, None])
        centre, places = (centre - start[:, None]) * widen[:, None], places * widen[:, None]
        places = torch.where(inside, places, 1e6)  # beyond any filter
        distance = (places[:, None, :] - centre[:, :, None]).abs_()
        weights = _triangle(distance) if interpolation == "bilinear" else _cubic(distance)
        weights = weights / weights.sum(2, keepdim=True)
    return torch.where((outs < num_out[:, None])[:, :, None], weights, 0.0)


def _nearest(length: Tensor, num_out: Tensor, size: int) -> Tensor:
    """The nearest of ``length`` samples for each of ``size``, (B, size); of two, the later one.

    Exact, where OpenCV's fixed point takes now the one and now the other.
    """
    outs = torch.arange(size, device=length.device)
    return (2 * outs + 1) * length[:, None].long() // (2 * num_out[:, None].long())


def _triangle(distance: Tensor) -> Tensor:
    return distance.neg_().add_(1).clamp_(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Pillow's, with a = -0.5."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def resample(values: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """(B, 3, H', W') of (B, 3, H, W), by ``down`` (B, H', H), ``across`` (B, W', W).

    On CUDA in float16, whose 11 bits keep whole levels exact and the result within 0.2 of one:
    tensor cores make it the cheapest operation of all instead of the dearest.
    """
    kind = torch.float16 if values.device.type == "cuda" else values.dtype
    batch, channels, height, _ = values.shape
    rows = values.to(kind).flatten(1, 2) @ across.to(kind).mT  # (B, 3 H, W')
    planes = rows.view(batch, channels, height, -1)
    return torch.matmul(down.to(kind)[:, None], planes).float()
