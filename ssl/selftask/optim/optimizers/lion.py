"""Lion, the sign of an interpolated momentum (Chen et al., arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.registry import register_optimizer


class Lion(torch.optim.Optimizer):
    """Lion: the update of a parameter w with gradient g, algorithm 2 of the paper::

    w <- w - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)
    m <- beta2 * m + (1 - beta2) * g
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, group by group."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if weights:
                self._update(weights, group)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        grads: list[Any] = [weight.grad for weight in weights]
        momenta = [self._momentum(weight) for weight in weights]
        # One by one: in torch 2.12, sharded tensors lack _foreach_lerp and _foreach_sign_.
        pairs = zip(momenta, grads, strict=True)
        updates = [torch.lerp(momentum, grad, 1 - beta1).sign_() for momentum, grad in pairs]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-lr)
        torch._foreach_lerp_(momenta, grads, 1 - beta2)

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum: Tensor = state["momentum"]
        return momentum


@register_optimizer("lion")
@dataclass(frozen=True, kw_only=True)
class LionConfig(FieldArguments):
    """Lion; its lr is 3 to 10 times lower than AdamW's, its weight decay 3 to 10 times higher."""

    optimizer = Lion

    betas: tuple[float, float] = setting((0.9, 0.99), of="schedules", min=0, below=1)
    """Interpolation factor of the update, and decay of the momentum."""
