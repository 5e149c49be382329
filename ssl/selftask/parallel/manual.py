"""Manual gradient reduction: flat buckets, sent during the backward pass.

Buckets are launched in a fixed order, so every rank calls the same collectives in the same order,
even if some parameters have no gradient on some ranks. With gloo, buckets use separate process
groups, so that they do not queue behind collectives in the backward pass of the loss. With NCCL,
all collectives use the default group. gloo has no mean, so gradients are divided before they are
sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from selftask.distributed.collectives import host_group, new_group, world_size
from selftask.distributed.heartbeat import collective_activity
from selftask.errors import RunError
from selftask.logs import get_logger
from selftask.parallel.reduction import Named, Reduction
from selftask.parallel.unused import count_ranks, describe, set_flags

log = get_logger(__name__)

_WIRE = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Bucket:
    """Parameters of one dtype, and the flat tensor through which their gradients are reduced.

    The tensor is allocated once, and gradients become views of it: their own memory is freed
    immediately, and nothing is copied back. Gradients are divided while they are copied in, which
    also keeps a sum of scaled gradients within the range of float16. One flag per parameter at the
    end of the tensor stays above zero if any rank has its gradient.

    Args:
        parameters: Parameters of one dtype and device.
        wire: Dtype in which gradients are sent; None for the dtype of the parameters.
        idle: Parameters without a gradient on any rank in the first step. Their flags are not read.
    """

    def __init__(
        self, parameters: list[nn.Parameter], wire: torch.dtype | None, idle: set[nn.Parameter]
    ) -> None:
        first = parameters[0]
        self.parameters = parameters
        self.missing = set(parameters)  # not copied in yet in this step
        self._idle = idle
        # not idle, without a gradient on this rank in this step
        self.absent: list[nn.Parameter] = []
        size = sum(p.numel() for p in parameters) + len(parameters)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        kept = sent = _split_like(self.flat, parameters)
        self.sent = self.flat
        if wire is not None and wire.itemsize < first.dtype.itemsize:
            self.sent = self.flat.to(wire)
            sent = _split_like(self.sent, parameters)
        self._places = dict(zip(parameters, zip(sent, kept, strict=True), strict=True))
        self._numbers = {p: number for number, p in enumerate(parameters)}
        self._flags = self.sent[-len(parameters) :]
        self._share = 1.0 / world_size()
        self.work: Any = None

    def take(self, parameter: nn.Parameter) -> None:
        """Copy in a gradient, divided by the number of ranks; a missing gradient counts as zero."""
        sent, kept = self._places[parameter]
        gradient = parameter.grad
        if gradient is None:
            sent.zero_()
        else:
            torch.mul(gradient.detach(), self._share, out=sent)
        if parameter.requires_grad:
            if gradient is None and parameter not in self._idle:
                self.absent.append(parameter)
            parameter.grad = kept  # a view that will hold the mean
        self.missing.discard(parameter)

    def launch(self, group: dist.ProcessGroup | None) -> None:
        """Copy in the remaining gradients, and start the all-reduce."""
        for parameter in list(self.missing):
            self.take(parameter)
        set_flags(self._flags, [self._numbers[parameter] for parameter in self.absent])
        self.work = dist.all_reduce(self.sent, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the all-reduce, after which the gradients are means over ranks, or None.

        The host waits for the device to read the flags only if a gradient is absent on this rank
        whose parameter is not idle.
        """
        self.work.wait()
        self.work = None
        if self.sent is not self.flat:
            self.flat.copy_(self.sent)
        if self.absent:
            counts = self._flags.tolist()
            for parameter in self.absent:
                if not counts[self._numbers[parameter]]:
                    parameter.grad = None
        self.absent.clear()
        self.missing.update(self.parameters)


class ManualReduction(Reduction):
    """Bucketed all-reduce of all parameters, overlapping with the backward pass.

    A parameter without a gradient on any rank gets none, as on one process. If only some ranks lack
    a gradient, it counts as zero there.

    Args:
        bucket_mb: Size of a bucket in MiB.
        compression: ``none``, or ``fp16`` or ``bf16`` to send half the bytes. Each gradient is
            rounded to 11 bits (fp16) or 8 bits (bf16), with a relative error of up to 5e-4 or 4e-3
            for each addition; fp16 loses values below 6e-8. Check the results of methods with small
            gradients (LARS, late training). Compression helps on slow networks only: on one
            machine, gloo takes 50 % longer with it.
        overlap: Whether buckets are sent during the backward pass. If False, any number of backward
            passes may precede ``reduce``.
    """

    def __init__(
        self, *, bucket_mb: float = 25.0, compression: str = "none", overlap: bool = True
    ) -> None:
        self._bytes = bucket_mb * 2**20
        self._wire = _WIRE[compression]
        self._overlap = overlap
        self._listens = False  # hooks launch buckets; False in the first step and under no_sync
        self._idle: Named = []  # without a gradient on any rank in the first step
        self._next = 0  # index of the first bucket that is not launched yet
        self._early = 0  # number of buckets that hooks may launch
        self._buckets: list[Bucket] = []

    def register(self, named: Named) -> None:
        self._named = named
        self._groups = bucket_groups()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        listens, self._listens = self._listens, False
        try:
            yield
        finally:
            self._listens = listens

    def reduce(self) -> None:
        if not self._buckets and self._named:
            self._begin()
        idle = self._without_gradient_anywhere()
        with collective_activity("all_reduce of gradients"):
            while self._next < len(self._buckets):
                self._launch_next()
            for bucket in self._buckets:
                bucket.finish()
        for parameter in idle:
            parameter.grad = None
        self._next = 0

    def on_unused(self, message: str) -> None:
        """Warn about parameters without a gradient in the first step; subclasses may raise."""
        log.warning("%s\n  what no rank has a gradient for keeps its value", message)

    def _begin(self) -> None:
        """Find unused parameters in the first step, then build the buckets.

        Hooks launch only buckets whose parameters have gradients on all ranks. Ranks would launch
        other buckets at different times, and thus in a different order relative to collectives of
        the loss in the same group.
        """
        names = [name for name, _ in self._named]
        counts = count_ranks([p.grad is not None for _, p in self._named])
        if min(counts) < world_size():
            self.on_unused(describe(names, counts))
        self._idle = [pair for pair, n in zip(self._named, counts, strict=True) if n == 0]
        if self._idle:  # on all ranks
            self._host_group = host_group()
        everywhere: list[nn.Parameter] = []
        elsewhere: list[nn.Parameter] = []
        for (_, p), n in zip(self._named, counts, strict=True):
            (everywhere if n == world_size() else elsewhere).append(p)
        # gradients arrive roughly in reverse order of the forward pass
        order = [*reversed(everywhere), *reversed(elsewhere)]
        early = _split(everywhere[::-1], self._bytes)
        self._early = len(early)
        parts = [*early, *_split(elsewhere[::-1], self._bytes)]
        idle = {parameter for _, parameter in self._idle}
        self._buckets = [Bucket(part, self._wire, idle) for part in parts]
        self._place = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in order]
        self._listens = self._overlap

    def stop(self) -> None:
        """Remove the hooks, since another reduction takes over these parameters."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: Tensor) -> None:
        """Gradient hook: copy the gradient into its bucket, and launch full buckets in order."""
        if not self._listens:
            return
        assert isinstance(parameter, nn.Parameter)
        bucket = self._place[parameter]
        if parameter not in bucket.missing:
            name = next(name for name, p in self._named if p is parameter)
            raise RunError(
                f"a second backward pass before task.reduce_gradients(): the gradient of {name} "
                "is on its way already; put all but the last one under task.no_sync()"
            )
        bucket.take(parameter)
        while self._next < self._early and not self._buckets[self._next].missing:
            self._launch_next()

    def _launch_next(self) -> None:
        self._buckets[self._next].launch(self._groups[self._next % len(self._groups)])
        self._next += 1

    def _without_gradient_anywhere(self) -> list[nn.Parameter]:
        """Return the parameters of ``_idle`` that have no gradient on any rank in this step.

        Unless ``_idle`` is empty, this is a collective on host tensors. It does not wait for the
        device.
        """
        if not self._idle:
            return []
        counts = count_ranks([p.grad is not None for _, p in self._idle], self._host_group)
        return [p for (_, p), count in zip(self._idle, counts, strict=True) if count == 0]


def bucket_groups() -> list[dist.ProcessGroup | None]:
    """Return the process groups that buckets use in turn. Every rank must call this function.

    With gloo these are two new groups, which is faster than one (docs/benchmarks.md). Other
    backends use the default group (None). With NCCL, concurrent collectives of two groups may
    deadlock, and SyncBatchNorm and gathers use the default group in the same backward pass.
    """
    return [new_group(), new_group()] if dist.get_backend() == "gloo" else [None]


def _split_like(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return views of a flat tensor in the shapes of parameters, with their strides if dense."""
    sizes = [p.numel() for p in parameters]
    chunks = flat[: sum(sizes)].split(sizes)
    parts = []
    for chunk, parameter in zip(chunks, parameters, strict=True):
        like = torch.empty_like(parameter, device="meta")  # keeps the strides of dense tensors
        strided = like.stride() == parameter.stride()
        shape, strides = parameter.shape, parameter.stride()
        parts.append(chunk.as_strided(shape, strides) if strided else chunk.view(shape))
    return parts


def _split(parameters: list[nn.Parameter], most_bytes: float) -> list[list[nn.Parameter]]:
    """Split parameters by dtype and device into lists of at most ``most_bytes``.

    A larger parameter gets a list of its own.
    """
    groups: list[list[nn.Parameter]] = []
    is_open: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.itemsize
        group, filled = is_open.get(kind, ([], 0))
        if not group or filled + size > most_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(parameter)
        is_open[kind] = group, filled + size
    return groups
