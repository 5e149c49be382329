"""LAMB, layer-wise adaptation of Adam for large batches (You et al., arXiv:1904.00962)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.optim.per_parameter import PerParameter
from selftask.registry import register_optimizer


class LAMB(PerParameter):
    """LAMB: the update of a parameter w with gradient g at its step t, algorithm 2 of the paper::

    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    r <- m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
    w <- w - lr * |w| / |r| * r  (the ratio is 1 if adapt=False or a norm is zero)
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

    def update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state.update(step=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["mean"].lerp_(grad, 1 - beta1) / (1 - beta1 ** state["step"])
        square = state["square"].lerp_(grad.square(), 1 - beta2) / (1 - beta2 ** state["step"])
        update = mean.div_(square.sqrt_().add_(self.eps)).add_(weight, alpha=group["weight_decay"])
        if group["adapt"]:
            update.mul_(_trust_ratio(weight.norm(), update.norm()))
        weight.sub_(update, alpha=group["lr"])


def _trust_ratio(weight_norm: Tensor, update_norm: Tensor) -> Tensor:
    ratio = weight_norm / update_norm
    return torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


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
