"""Gradient clipping by norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_sum
from selftask.hooks.base import Hook
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task


@register_hook("clip_gradients")
@dataclass(eq=False, kw_only=True)
class ClipGradients(Hook):
    """Scales the reduced, unscaled gradient down to a norm of at most ``max_norm``.

    The norm is that of all parameters together, or of each one with ``per_parameter``, as in DINO's
    published code. The log shows the global norm before clipping.
    """

    priority: ClassVar[int] = 20
    max_norm: float = setting(3.0, above=0)
    per_parameter: bool = False

    def on_backward(self, task: Task) -> None:
        parameters = [p for group in task.optimizer.param_groups for p in group["params"]]
        norm = clip(parameters, self.max_norm, per_parameter=self.per_parameter)
        task.log("grad_norm", norm)


@torch.no_grad()
def clip(parameters: list[nn.Parameter], max_norm: float, *, per_parameter: bool = False) -> Tensor:
    """Clip the global norm, or each parameter's; return the global norm before clipping.

    With sharded parameters (FSDP) each rank scales its own shard by the norm over all shards.

    Args:
        parameters: Parameters whose gradients are clipped in place.
        max_norm: Maximum norm.
        per_parameter: Clip the norm of each parameter instead of the global norm.
    """
    grads: list[Any] = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    is_sharded = [hasattr(grad, "to_local") for grad in grads]
    parts = [g.to_local() if part else g for g, part in zip(grads, is_sharded, strict=True)]
    each = list(torch._foreach_norm(parts))
    if any(is_sharded):
        own = torch.stack([norm for norm, part in zip(each, is_sharded, strict=True) if part])
        whole = iter(all_reduce_sum(own.square()).sqrt().unbind())
        each = [next(whole) if part else n for n, part in zip(each, is_sharded, strict=True)]
    norms = torch.stack(each)  # (parameters,)
    norm = norms.norm()
    scale = (max_norm / ((norms if per_parameter else norm) + 1e-6)).clamp(max=1.0)
    if per_parameter:
        torch._foreach_mul_(parts, list(scale.unbind()))
    else:
        torch._foreach_mul_(parts, scale)
    return norm
