"""A hook that changes gradients between the backward pass and the optimizer step.

Yong et al., Gradient Centralization, ECCV 2020, arXiv:2004.01461.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from selftask.hooks.base import Hook
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task


@register_hook("centralize_gradients")
@dataclass(eq=False, kw_only=True)
class CentralizeGradients(Hook):
    """Subtracts from the gradient of each weight its mean over the inputs (eq. 1)."""

    priority: ClassVar[int] = 15  # before clipping
    min_dims: int = 2  # minimum dimensions of a weight; biases and norms have one

    def on_backward(self, task: Task) -> None:
        for group in task.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim >= self.min_dims:
                    inputs = tuple(range(1, parameter.ndim))
                    parameter.grad -= parameter.grad.mean(dim=inputs, keepdim=True)
