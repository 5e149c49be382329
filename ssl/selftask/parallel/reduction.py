"""What a task asks of the way its gradients are reduced; on one process there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


class Reduction:
    """One process: gradients are what they should be, and every tensor is whole.

    The others override what they need. Calls come in this order: ``shard``, ``wrap``,
    ``regroup``, ``register`` once; then at each step ``no_sync`` and ``reduce``; the rest is for
    checkpoints, evaluations and exports.
    """

    def shard(self, networks: Iterable[nn.Module]) -> None:
        """Leave each rank its part of the networks: the trained one, and teachers."""

    def wrap(self, network: nn.Module) -> nn.Module:
        """What the step calls in place of the network."""
        return network

    def regroup(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The optimizer's groups so that each holds one kind of tensor."""
        return groups

    def register(self, named: Named) -> None:
        """All trained parameters, the method's too, with names; the same list on every rank."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Around forward and backward of all batches of a step but the last."""
        return nullcontext()

    def reduce(self) -> None:
        """After the backward pass: every gradient is its mean over ranks."""

    def full_state(self, state: Any) -> Any:
        """A nested state for a file; every rank calls, what was sharded is on the first one."""
        return state

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Where this rank's part of a tensor is read into that was sharded when it was written."""
        return torch.empty(shape, dtype=dtype)

    def shard_state(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Of the state dict of a whole ``module``, this rank's part."""
        return state

    def rearrange(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state as that of one with the groups that ``regroup`` was given."""
        return state

    def shard_state_of_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of such a state, made whole, this rank's part."""
        return state

    def unsharded(self, module: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
        """``module`` as one rank alone can use it; every rank calls.

        ``build`` makes a new one like it.
        """
        return module
