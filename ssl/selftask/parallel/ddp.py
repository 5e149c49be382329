"""DistributedDataParallel for the network; the method's own parameters are reduced manually."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from selftask.distributed.accelerator import is_accelerator
from selftask.errors import RunError
from selftask.parallel.manual import ManualReduction
from selftask.parallel.reduction import Named, Reduction

_ADVICE = (
    "parallel.reduce=ddp waits for every gradient; take the parameter out of the model, freeze it "
    "(requires_grad_(False)), set parallel.find_unused=true, or use parallel.reduce=manual, which "
    "leaves it as it is"
)


class DDPReduction(Reduction):
    """DDP from the second step on; the first step is reduced manually to find unused parameters.

    A parameter without a gradient raises RunError with its name; with ``find_unused`` it keeps its
    value. After the first step, the method's own parameters may lack a gradient in either case.
    Plain DDP would hang, or fail one step later and report parameter indices only. As in the other
    reductions, buffers are not synchronized.

    Args:
        bucket_mb: Size of a bucket in MiB.
        static_graph: As in ``DistributedDataParallel``.
        find_unused: Whether parameters may have no gradient.
    """

    def __init__(
        self, *, bucket_mb: float = 25.0, static_graph: bool = False, find_unused: bool = False
    ) -> None:
        self._bucket_mb, self._static_graph = bucket_mb, static_graph
        self._find_unused = find_unused
        self._is_first = True
        self._method: Reduction = Reduction()  # for parameters outside the network

    def wrap(self, network: nn.Module) -> nn.Module:
        self._module = _Replaceable(network)
        return self._module

    def register(self, named: Named) -> None:
        inside = set(self._module.network.parameters())
        self._named = [(name, p) for name, p in named if p in inside]
        rest = [(name, p) for name, p in named if p not in inside]
        self._all = _FirstStep(bucket_mb=self._bucket_mb)
        self._all.strict = not self._find_unused
        self._all.register(named)
        if rest:
            self._method = ManualReduction(bucket_mb=self._bucket_mb)
            self._method.register(rest)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        network: Any = self._module.network
        with self._method.no_sync():
            if self._is_first:
                yield
            else:
                with network.no_sync():
                    yield

    def reduce(self) -> None:
        if self._is_first:
            self._all.reduce()
            self._all.stop()
            del self._all  # and its copy of all gradients
            self._begin()
            return
        self._method.reduce()
        if self._find_unused:
            return
        missing = [name for name, p in self._named if p.requires_grad and p.grad is None]
        if missing:
            raise RunError(f"no gradient in this step: {', '.join(missing)}\n{_ADVICE}")

    def _begin(self) -> None:
        self._is_first = False
        network = self._module.network
        device = next(network.parameters()).device
        with warnings.catch_warnings():
            # the replacement of broadcast_buffers would broadcast the buffers of rank 0 once
            warnings.simplefilter("ignore", FutureWarning)
            self._module.network = DistributedDataParallel(
                network,
                device_ids=[device] if is_accelerator(device) else None,
                broadcast_buffers=False,
                init_sync=False,  # weights are already equal
                bucket_cap_mb=self._bucket_mb,
                gradient_as_bucket_view=True,
                static_graph=self._static_graph,
                find_unused_parameters=self._find_unused,
            )


class _FirstStep(ManualReduction):
    """Reduction for the first step only, which communicates after the backward pass."""

    strict = True  # every parameter must have a gradient

    def register(self, named: Named) -> None:
        self._named = named
        self._groups = [dist.group.WORLD]

    def on_unused(self, message: str) -> None:
        if self.strict:
            raise RunError(f"{message}\n{_ADVICE}")
        super().on_unused(message)


class _Replaceable(nn.Module):
    """Module called by the step: the bare network in the first step, then its DDP wrapper."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)
