"""Base class of optimizers that update parameters one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PerParameter(torch.optim.Optimizer):
    """Optimizer that calls ``update`` for each parameter that has a gradient."""

    @abstractmethod
    def update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter in place, without synchronizing with the device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; return the loss of ``closure``."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)
        return loss
