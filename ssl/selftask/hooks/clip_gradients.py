"""Keep the norm of the gradient below a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from selftask.hooks.base import Hook
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task


@register_hook("clip_gradients")
@dataclass(eq=False, kw_only=True)
class ClipGradients(Hook):
    """Scales the reduced, unscaled gradient down to a global norm of at most ``max_norm``."""

    priority: ClassVar[int] = 20
    max_norm: float = 3.0

    def on_backward(self, task: Task) -> None:
        parameters = [p for group in task.optimizer.param_groups for p in group["params"]]
        task.log("grad_norm", nn.utils.clip_grad_norm_(parameters, self.max_norm))
