"""Keep the norm of the gradient below a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from selftask.collectives import all_reduce_sum
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
        task.log("grad_norm", clip(parameters, self.max_norm))


@torch.no_grad()
def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm together is at most that; the norm before.

    Of sharded parameters (FSDP) each rank scales its own part by the norm of all parts.
    """
    grads: list[Any] = [p.grad for p in parameters if p.grad is not None]
    parts = [grad.to_local() for grad in grads if hasattr(grad, "to_local")]
    if not parts:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    whole = [grad for grad in grads if not hasattr(grad, "to_local")]
    squares = all_reduce_sum(_square(parts)) + _square(whole)
    norm = squares.sqrt()
    torch._foreach_mul_([*parts, *whole], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _square(tensors: list[Tensor]) -> Tensor:
    """The squared norm of all of them together."""
    if not tensors:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm(tensors)).square().sum()
