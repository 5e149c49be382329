"""Interface of gradient reductions, and the implementation for a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from selftask.parallel.initial_weights import InitialWeights

Named = list[tuple[str, nn.Parameter]]


class Reduction:
    """Gradient reduction of a single process, which does nothing.

    Subclasses override the methods they need. The order of calls is: ``shard``, ``wrap``,
    ``regroup`` and ``register`` once, then ``no_sync`` and ``reduce`` at each step. The other
    methods are for checkpoints, evaluations and exports.
    """

    def shard(self, networks: Iterable[nn.Module], initial: InitialWeights) -> None:
        """Shard networks, the trained one first, then teachers; ``initial`` has their weights."""

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the module that the step calls instead of the network."""
        return network

    def regroup(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the optimizer's groups, split into sharded and unsharded parameters if needed."""
        return groups

    def register(self, named: Named) -> None:
        """Register all trained parameters with names, the same list on every rank."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context for forward and backward passes of all batches of a step except the last."""
        return nullcontext()

    def reduce(self) -> None:
        """Average gradients over ranks, after the backward pass."""

    def discard(self) -> None:
        """Discard gradients of an abandoned step that are kept outside of ``Parameter.grad``."""

    def full_state(self, state: Any) -> Any:
        """Return a nested state with full tensors on the CPU in place of sharded ones.

        On ranks other than 0, these tensors have no elements. Every rank must call this method.
        """
        return state

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of ``shape``, sharded over ranks if parameters are."""
        return torch.empty(shape, dtype=dtype)

    def shard_state(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a full state dict with its tensors sharded like those of ``module``."""
        return state

    def rearrange(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert an optimizer's state dict to the parameter groups that ``regroup`` received."""
        return state

    def shard_state_of_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shard of an optimizer's full state dict.

        ``state`` has the parameter groups before ``regroup``, as returned by ``rearrange``.
        """
        return state

    def unsharded(self, module: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
        """Return ``module`` in a form that one rank can use alone. Every rank must call it.

        Args:
            module: A possibly sharded module.
            build: Function that builds a new module of the same architecture.

        Returns:
            ``module`` itself if it is not sharded, else a copy with full tensors.
        """
        return module
