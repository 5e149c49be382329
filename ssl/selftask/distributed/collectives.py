"""Collectives that also work on one process without a process group, unless stated otherwise.

Callers therefore need no special case for a single process. gloo has no AVG, so means are sums
divided by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from selftask.distributed.heartbeat import collective_activity
from selftask.distributed.simulated import SIMULATED


def world_size() -> int:
    """Return the number of ranks, also of simulated ones, or 1 without a process group."""
    if SIMULATED.active:
        return SIMULATED.size
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, or 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_primary() -> bool:
    """Return True on rank 0, which writes files and console output."""
    return rank() == 0


def collective_device() -> torch.device:
    """Return the device type that tensors must have for collectives of the default group."""
    return torch.device({"nccl": "cuda", "xccl": "xpu"}.get(dist.get_backend(), "cpu"))


def new_group(ranks: list[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group whose collectives do not queue behind the default group's.

    Every rank must call this function, including ranks outside the group.

    Args:
        ranks: Members of the group; None means all ranks.
        backend: Backend of the group; None means the backend of the default group.

    Returns:
        The group, with the timeout of the default group.
    """
    world: Any = dist.group.WORLD
    options = getattr(world._get_backend(collective_device()), "options", None)
    timeout = getattr(options, "_timeout", None)
    return dist.new_group(ranks, timeout=timeout, backend=backend)  # type: ignore[return-value]


def host_group() -> dist.ProcessGroup | None:
    """Return a gloo group for CPU tensors; its collectives do not wait for the device.

    Every rank must call this function. It returns None if the default group uses gloo.
    """
    group: Any = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return group


def barrier() -> None:
    """Wait until every rank has called this function."""
    if world_size() > 1 and not SIMULATED.active:
        with collective_activity("barrier"):
            dist.barrier()


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of ``x`` over ranks, detached.

    Args:
        x: Tensor of the same shape on every rank; it is not modified.
        group: Group to reduce over; None means all ranks.

    Returns:
        A new tensor, or a view of ``x`` on one rank.
    """
    return x.detach() if world_size() == 1 else _reduced(x, group)


def all_reduce_max(x: Tensor) -> Tensor:
    """Return the elementwise maximum of ``x`` over ranks, detached; see ``all_reduce_sum``."""
    return x.detach() if world_size() == 1 else _reduced(x, None, dist.ReduceOp.MAX)


def _reduced(x: Tensor, group: dist.ProcessGroup | None, op: Any = None) -> Tensor:
    """Return a new tensor, reduced over ranks by ``op``; None means the sum."""
    x = x.detach().clone()
    if SIMULATED.active:
        return SIMULATED.all_reduce(x)
    with collective_activity("all_reduce"):
        dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=group)
    return x


def all_reduce_mean(x: Tensor) -> Tensor:
    """Return the mean of ``x`` over ranks as a new detached tensor, or ``x`` itself on one rank.

    ``x`` has the same shape on every rank.
    """
    return x if world_size() == 1 else all_reduce_sum(x) / world_size()


def all_gather_cat(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate ``x`` of all ranks in rank order, without gradient.

    Args:
        x: Tensor of the same shape on every rank.
        group: Ranks to gather from; None means all ranks.

    Shape:
        (B, ...) on each of W ranks -> (B * W, ...).
    """
    if world_size() == 1:
        return x.detach()
    if SIMULATED.active:
        return SIMULATED.all_gather(x.detach())
    rows = dist.get_world_size(group) * len(x)
    every = x.new_empty(rows, *x.shape[1:])
    # torch 2.14 renames all_gather_into_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with collective_activity("all_gather"):
        gather(every, x.detach().contiguous(), group=group)
    return every


def reduce_scatter_sum(x: Tensor) -> Tensor:
    """Return this rank's rows of the sum of ``x`` over ranks, without gradient.

    Unlike the other collectives, it needs a process group or simulated ranks. NCCL sends half the
    bytes of an all-reduce. gloo would save nothing, so an all-reduce is used.

    Shape:
        (B * W, ...) on each of W ranks -> (B, ...).
    """
    if SIMULATED.active:
        return SIMULATED.reduce_scatter(x)
    rows = len(x) // world_size()
    if dist.get_backend() == "gloo":
        return all_reduce_sum(x)[rank() * rows : (rank() + 1) * rows]
    mine = x.new_empty(rows, *x.shape[1:])
    # torch 2.14 renames reduce_scatter_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with collective_activity("reduce_scatter"):
        scatter(mine, x.detach().contiguous())
    return mine


def all_to_all_cat(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Exchange rows of ``x`` between ranks, without gradient.

    Consecutive rows go to ranks 0, 1, ...; the received rows are concatenated in rank order.

    Args:
        x: (B, ...), of the same shape on every rank.
        sent: Number of rows for each rank; their sum is B.
        received: Number of rows from each rank; their sum is B.

    Shape:
        (B, ...) -> (B, ...).
    """
    x = x.detach().contiguous()
    if world_size() == 1:
        return x
    if SIMULATED.active:
        return SIMULATED.all_to_all(x)
    rows = torch.empty_like(x)
    with collective_activity("all_to_all"):
        dist.all_to_all_single(rows, x, received, sent)
    return rows


def gather_cat_with_grad(x: Tensor) -> Tensor:
    """Concatenate ``x`` of all ranks in rank order; gradients flow to every rank.

    The backward pass sums gradients over ranks, which gives the gradient of the *sum* of all
    ranks' losses. If each rank's loss is a mean over the global batch, averaging the gradients
    over ranks afterwards gives the correct result.

    Shape:
        (B, ...) on each of W ranks -> (B * W, ...).
    """
    return x if world_size() == 1 else _Gather.apply(x)


def sum_with_grad(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of ``x`` over ranks; the backward pass also sums gradients over ranks.

    Args:
        x: Tensor, with the same shape on every rank.
        group: Group to reduce over; None means all ranks.
    """
    return x if world_size() == 1 else _Sum.apply(x, group)


def sum_with_equal_grad(x: Tensor) -> Tensor:
    """Return the sum of ``x`` over ranks, for a loss that all ranks compute from such sums alone.

    The gradient of the sum is then the same on each rank, and the backward pass multiplies it by
    the number of ranks. The result equals that of ``sum_with_grad``, with half of the
    communication.

    Args:
        x: Tensor, with the same shape on every rank.
    """
    return x if world_size() == 1 else _SumWithEqualGrad.apply(x)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_gather_cat(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return reduce_scatter_sum(grads[0])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grads[0], ctx.group), None


class _SumWithEqualGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * world_size()


@torch.no_grad()
def broadcast_module(module: nn.Module) -> None:
    """Copy parameters and buffers from rank 0 to every rank, in place."""
    if world_size() > 1 and not SIMULATED.active:
        with collective_activity("broadcast"):
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, src=0)


@torch.no_grad()
def average_statistics(module: nn.Module) -> None:
    """Replace BatchNorm's running statistics by their mean over ranks; broadcast other buffers."""
    statistics: list[Tensor] = []
    others: list[Tensor] = []
    for name, buffer in module.named_buffers():
        is_statistic = name.endswith(("running_mean", "running_var"))
        (statistics if is_statistic else others).append(buffer)
    if world_size() > 1:
        for alike in _alike(statistics):
            _fill(alike, all_reduce_mean(_flat(alike)))
    broadcast_tensors(others)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Copy tensors in place from rank 0 to every rank, one broadcast per dtype and device type."""
    if world_size() > 1 and not SIMULATED.active:
        with collective_activity("broadcast of buffers"):
            for alike in _alike(tensors):
                flat = _flat(alike)
                dist.broadcast(flat, src=0)
                _fill(alike, flat)


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return lists of tensors of equal dtype and device type, in the same order on every rank."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device.type), []).append(tensor)
    return groups.values()


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _fill(tensors: list[Tensor], flat: Tensor) -> None:
    for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def gather_objects(value: Any) -> list[Any]:
    """Return the object ``value`` of each rank in rank order. Every rank must call it."""
    if world_size() == 1 or SIMULATED.active:
        return [value] * world_size()
    values: list[Any] = [None] * world_size()
    with collective_activity("all_gather of objects"):
        dist.all_gather_object(values, value)
    return values


class AnyFlag:
    """Non-blocking any-rank flag: set at one step, read at the next.

    The reduction uses gloo even if gradients use NCCL, so that the flag stays on the host.
    """

    def __init__(self) -> None:
        self._alone = world_size() == 1
        self._pending: tuple[Any, Tensor] | None = None
        self._group = None if self._alone else host_group()

    def poll(self, is_set: bool) -> bool:
        """Start a reduction of this rank's flag; return True if the previous one was set anywhere.

        Every rank must call this method. The first call returns False; one process returns
        ``is_set`` itself.

        Args:
            is_set: Whether the flag of this rank is set.
        """
        if self._alone:
            return is_set
        previous = self.drain()
        flag = torch.tensor(float(is_set))
        self._pending = dist.all_reduce(flag, group=self._group, async_op=True), flag
        return previous

    def drain(self) -> bool:
        """Wait for the pending reduction and return its result, or False if there is none."""
        if self._pending is None:
            return False
        work, flag = self._pending
        self._pending = None
        with collective_activity("all_reduce of the flag to stop"):
            work.wait()
        return bool(flag.item() > 0)
