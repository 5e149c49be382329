"""Norms and clipping of gradients, also of sharded parameters (FSDP)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from selftask.distributed.collectives import all_gather_cat
from selftask.distributed.shards import ranks_of_shards

_EPS = 1e-6  # added to a norm before dividing by it, as in torch's clip_grad_norm_
_MIN_WEIGHT = 1e-3  # lower bound of weight norms, so that units with weights of zero can be trained


def gradients(parameters: Iterable[nn.Parameter]) -> list[Any]:
    """Return the gradients of those parameters that have one."""
    return [p.grad for p in parameters if p.grad is not None]


def whole_norms(
    tensors: list[Any], p: float = 2.0, *, shards_of: list[Any] | None = None
) -> Tensor:
    """Return the p-norm of each tensor, (T,); for a shard, the norm of the full tensor.

    Every rank must call this function if there are shards.

    Args:
        tensors: Tensors, or shards of them; at least one.
        p: Order of the norm.
        shards_of: Sharded tensors, if ``tensors`` are plain tensors with the values of such shards.
    """
    shards_of = tensors if shards_of is None else shards_of
    parts = [part if part.numel() else part.new_zeros(1) for part in local_parts(tensors)]
    by_index: dict[int, Tensor] = {}
    for indices in _places_by_device(parts):
        norms_here = torch._foreach_norm([parts[i] for i in indices], p)
        by_index.update(zip(indices, norms_here, strict=True))
    norms = torch.stack(to_one_device(by_index[i] for i in range(len(parts))))
    sharded = [i for i, tensor in enumerate(shards_of) if _is_sharded(tensor)]
    if sharded:
        first = shards_of[sharded[0]]
        each = norms.unbind()  # an index of numbers would be copied from the host, which waits
        mine = torch.stack([each[i] for i in sharded])[None].to(first.device_mesh.device_type)
        ranks = ranks_of_shards(first)
        of_ranks = all_gather_cat(mine).unbind()
        every = torch.stack([of_ranks[i] for i in ranks])  # (ranks, S)
        of_shards = torch.linalg.vector_norm(every, ord=p, dim=0).to(norms.device).unbind()
        merged = dict(enumerate(each)) | dict(zip(sharded, of_shards, strict=True))
        norms = torch.stack([merged[i] for i in range(len(each))])
    return norms


def to_one_device(values: Iterable[Tensor]) -> list[Tensor]:
    """Move all values to the CPU if some of them are on it (``parallel.cpu_offload``)."""
    values = list(values)
    mixed = len({value.device.type for value in values}) > 1
    return [value.cpu() for value in values] if mixed else values


@torch.no_grad()
def total_norm(tensors: list[Any], p: float = 2.0) -> Tensor:
    """Return the p-norm of all tensors together, a scalar; 0 for an empty list.

    Every rank must call this function if there are shards.
    """
    return torch.linalg.vector_norm(whole_norms(tensors, p), p) if tensors else torch.zeros(())


@torch.no_grad()
def clip_norm(grads: list[Any], max_norm: float, *, p: float = 2.0, each: bool = False) -> Tensor:
    """Scale gradients in place to a p-norm of at most ``max_norm``.

    Every rank must call this function if there are shards.

    Args:
        grads: Gradients, or shards of them.
        max_norm: Maximum norm.
        p: Order of the norm; infinity for the largest absolute value.
        each: Clip the norm of each gradient instead of the total norm.

    Returns:
        The total norm before clipping, a scalar; 0 without gradients.
    """
    if not grads:
        return torch.zeros(())
    norms = whole_norms(grads, p)
    norm = torch.linalg.vector_norm(norms, p)
    scale = (max_norm / ((norms if each else norm) + _EPS)).clamp(max=1.0)
    local, scales = local_parts(grads), scale.unbind() if each else ()
    for places in _places_by_device(local):
        mine = [local[i] for i in places]
        torch._foreach_mul_(mine, [scales[i].to(mine[0].device) for i in places] if each else scale)
    return norm


@torch.no_grad()
def clip_value(grads: list[Any], max_value: float) -> None:
    """Clamp each element of the gradients in place to [-max_value, max_value]."""
    if grads:
        local = local_parts(grads)
        for places in _places_by_device(local):
            torch._foreach_clamp_min_([local[i] for i in places], -max_value)
            torch._foreach_clamp_max_([local[i] for i in places], max_value)


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], max_ratio: float) -> None:
    """Clip gradients unit-wise and in place: adaptive clipping, arXiv:2102.06171, equation 3.

    The gradient G of a unit with weights W is scaled to max_ratio * max(|W|, 1e-3) if its norm is
    larger. A unit is a row: the weights of one output. Biases and gains are one unit. Every rank
    must call this function if there are shards.

    Args:
        parameters: Parameters whose gradients are clipped, if they have one.
        max_ratio: Largest ratio of a unit's gradient norm to its weight norm.
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        weight, grad = (_unit_norm(tensor) for tensor in (parameter.detach(), parameter.grad))
        limit = weight.clamp(min=_MIN_WEIGHT) * max_ratio
        scale = torch.where(grad > limit, limit / grad.clamp(min=_EPS), 1.0)
        local_parts([parameter.grad])[0].mul_(scale)


def _unit_norm(tensor: Any) -> Tensor:
    """Return the norm of each row (R, 1, ...), or of a whole vector; FSDP shards by rows."""
    if tensor.ndim <= 1:
        return whole_norms([tensor])[0]
    rows: Tensor = local_parts([tensor])[0]
    return torch.linalg.vector_norm(rows, dim=tuple(range(1, rows.ndim)), keepdim=True)


def _places_by_device(tensors: list[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors on each device; a foreach function takes one device."""
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(i)
    return list(places.values())


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


def local_parts(tensors: list[Any]) -> list[Tensor]:
    """Return this rank's shards of sharded tensors, and other tensors as they are."""
    return [tensor.to_local() if _is_sharded(tensor) else tensor for tensor in tensors]
