"""Resampling as matrices: one for the columns and one for the rows of each image."""

from __future__ import annotations

import torch
from torch import Tensor


def filter_matrix(
    start: Tensor,
    length: Tensor,
    num_out: Tensor | int,
    shape: tuple[int, int],
    interpolation: str,
) -> Tensor:
    """Weights (B, O, I) that make ``num_out`` samples of ``length`` ones, from ``start`` on.

    start and length are (B,), num_out is a number or (B,); ``shape`` is (O, I), at least as large
    as any of them. The filter is Pillow's: it widens when it shrinks, and where it reaches beyond
    the crop (which may be a part of the image) its other weights make up for it. Rows beyond
    ``num_out`` are zero.
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
    """The nearest of ``length`` samples for each of ``size``, (B, size); of two, the later one.

    Exact, where OpenCV's fixed point takes now the one and now the other.
    """
    outs = torch.arange(size, device=length.device)
    wanted = num_out if isinstance(num_out, int) else num_out[:, None].long()
    return (2 * outs + 1) * length[:, None].long() // (2 * wanted)


def _triangle(distance: Tensor) -> Tensor:
    return distance.neg_().add_(1).clamp_(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Pillow's, with a = -0.5."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def resample(
    values: Tensor, down: Tensor, across: Tensor, kind: torch.dtype | None = None
) -> Tensor:
    """(B, 3, H', W') of (B, 3, H, W), by ``down`` (B, H', H), ``across`` (B, W', W).

    ``kind`` is what it is computed in. On CUDA that is float16, whose 11 bits keep whole levels
    exact and the result within half of one: tensor cores make it the cheapest operation of all
    instead of the dearest.
    """
    if kind is None:
        kind = torch.float16 if values.device.type == "cuda" else values.dtype
    batch, channels, height, _ = values.shape
    rows = values.to(kind).flatten(1, 2) @ across.to(kind).mT  # (B, 3 H, W')
    planes = rows.view(batch, channels, height, -1)
    return torch.matmul(down.to(kind)[:, None], planes).float()
