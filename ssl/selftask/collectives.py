"""Collectives that are the identity on one process, so that nobody else asks how many there are.

One differentiable gather and one set of reductions serve every method. gloo has no AVG: means are
sums divided by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_AVAILABLE = dist.is_available()


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if _AVAILABLE and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if _AVAILABLE and dist.is_initialized() else 0


def is_primary() -> bool:
    """Whether this process is the one that writes files and lines."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of ``x`` over ranks, as a new tensor without gradient; ``x`` itself on one rank."""
    if world_size() == 1:
        return x.detach()
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def all_reduce_mean(x: Tensor) -> Tensor:
    """The mean of ``x`` over ranks, as a new tensor without gradient; ``x`` itself on one rank."""
    return x if world_size() == 1 else all_reduce_sum(x) / world_size()


def all_gather_cat(x: Tensor) -> Tensor:
    """``x`` (B, ...) of all ranks, concatenated in rank order to (B * W, ...); no gradient."""
    if world_size() == 1:
        return x.detach()
    parts = [torch.empty_like(x, requires_grad=False) for _ in range(world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)


def gather_cat_with_grad(x: Tensor) -> Tensor:
    """``x`` (B, ...) of all ranks as (B * W, ...), through which gradients flow to every rank.

    The backward sums over ranks: the gradient of the *sum* of all ranks' losses. Losses that are
    means over the global batch on each rank therefore keep their gradients right under the
    mean reduction of ``all_reduce_gradients``.
    """
    return x if world_size() == 1 else _Gather.apply(x)


def sum_with_grad(x: Tensor) -> Tensor:
    """The sum of ``x`` over ranks, through which gradients flow to every rank (and are summed)."""
    return x if world_size() == 1 else _Sum.apply(x)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = len(x)
        return all_gather_cat(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        start = rank() * ctx.rows
        return all_reduce_sum(grads[0])[start : start + ctx.rows]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return all_reduce_sum(grads[0])


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over ranks, one flat bucket per dtype.

    A parameter that got a gradient on some ranks only counts as zero on the others: every rank
    must call the same collectives in the same order.
    """
    if world_size() > 1:
        _all_reduce_gradients(parameters)


@torch.no_grad()
def _all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            buckets.setdefault(parameter.dtype, []).append(parameter)
    for bucket in buckets.values():
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in bucket if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= world_size()
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])


@torch.no_grad()
def broadcast_module(module: nn.Module) -> None:
    """Make parameters and buffers those of rank 0."""
    if world_size() > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)


@torch.no_grad()
def broadcast_buffers(module: nn.Module) -> None:
    """Make buffers those of rank 0: without DDP, BatchNorm statistics drift apart between ranks."""
    if world_size() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def gather_objects(thing: Any) -> list[Any]:
    """``thing`` of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [thing]
    things: list[Any] = [None] * world_size()
    dist.all_gather_object(things, thing)
    return things
