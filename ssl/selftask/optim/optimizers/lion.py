"""Lion, the sign of an interpolated momentum (Chen et al., arXiv:2302.06675)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.optim.gradients import local_parts
from selftask.optim.per_group import PerGroup
from selftask.registry import register_optimizer


class Lion(PerGroup):
    """Lion: the update of a parameter w with gradient g, algorithm 2 of the paper::

        w <- w - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)
        m <- beta2 * m + (1 - beta2) * g

    The momentum m starts at zero.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update_group(self, weights: list[Tensor], grads: list[Tensor], group: Any) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        momenta = local_parts(self.states(weights, "momentum"))
        weights, grads = local_parts(weights), local_parts(grads)
        updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-lr)
        torch._foreach_lerp_(momenta, grads, 1 - beta2)


@register_optimizer("lion")
@dataclass(frozen=True, kw_only=True)
class LionConfig(FieldArguments):
    """Lion; lr should be 3 to 10 times lower than for AdamW, weight decay 3 to 10 times higher."""

    optimizer = Lion

    betas: tuple[float, float] = setting((0.9, 0.99), of="schedules", min=0, below=1)
    """Interpolation factor beta1 of the update, and decay beta2 of the momentum."""
