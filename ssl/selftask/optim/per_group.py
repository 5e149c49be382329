"""Base class of optimizers that update all parameters of a group at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PerGroup(torch.optim.Optimizer):
    """Optimizer that calls ``update_group`` with the parameters that have a gradient."""

    @abstractmethod
    def update_group(self, weights: list[Tensor], grads: list[Tensor], group: Any) -> None:
        """Update parameters in place, without waiting for the device.

        Args:
            weights: Parameters of the group that have a gradient, at least one; of any shape.
            grads: Their gradients, of the same shapes.
            group: The parameter group.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; return the loss of ``closure``, if given."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if weights:
                self.update_group(weights, [p.grad for p in weights], group)
        return loss

    def states(self, weights: list[Tensor], name: str) -> list[Tensor]:
        """Return the tensor ``name`` of each parameter's state; a missing one is set to zeros."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight)
        return [self.state[weight][name] for weight in weights]
