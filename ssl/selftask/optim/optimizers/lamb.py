"""LAMB, layer-wise adaptation of Adam for large batches (You et al., arXiv:1904.00962)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.optim.gradients import local_parts, whole_norms
from selftask.optim.per_group import PerGroup
from selftask.registry import register_optimizer


class LAMB(PerGroup):
    """LAMB: the update of a parameter w with gradient g at its step t, algorithm 2 of the paper::

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        r <- m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w <- w - lr * |w| / |r| * r

    The ratio |w| / |r| is replaced by 1 if adapt=False or a norm is zero.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "adapt": True}
        self.eps = eps
        super().__init__(params, defaults)

    def update_group(self, weights: list[Tensor], grads: list[Tensor], group: Any) -> None:
        beta1, beta2 = group["betas"]
        means = local_parts(self.states(weights, "mean"))
        squares = local_parts(self.states(weights, "square"))
        parts, grads = local_parts(weights), local_parts(grads)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_lerp_(squares, torch._foreach_mul(grads, grads), 1 - beta2)
        counts = [self._count(weight) for weight in weights]
        updates = list(torch._foreach_div(means, [1 - beta1**count for count in counts]))
        scales = torch._foreach_div(squares, [1 - beta2**count for count in counts])
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, self.eps)
        torch._foreach_div_(updates, scales)
        torch._foreach_add_(updates, parts, alpha=group["weight_decay"])
        if group["adapt"]:
            ratios = _trust_ratios(whole_norms(weights), whole_norms(updates, shards_of=weights))
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_add_(parts, updates, alpha=-group["lr"])

    def _count(self, weight: Tensor) -> int:
        """Increment and return the parameter's number of steps."""
        count: int = self.state[weight].get("step", 0) + 1
        self.state[weight]["step"] = count
        return count


def _trust_ratios(of_weights: Tensor, of_updates: Tensor) -> Tensor:
    ratios = of_weights / of_updates
    return torch.where((of_weights > 0) & (of_updates > 0), ratios, 1.0)


@register_optimizer("lamb")
@dataclass(frozen=True, kw_only=True)
class LAMBConfig(FieldArguments):
    """LAMB; weights are adapted, biases and norms get Adam's plain update."""

    optimizer = LAMB
    layerwise: ClassVar[bool] = True  # groups with adapt=False are handled separately

    betas: tuple[float, float] = setting((0.9, 0.999), of="schedules", min=0, below=1)
    """Decay of the first and second moment."""
    eps: float = setting(1e-6, above=0)
    """Term added to the denominator for numerical stability."""
