"""LARS, layer-wise adaptive rate scaling for large batches (You et al., arXiv:1708.03888)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.optim.per_parameter import PerParameter
from selftask.registry import register_optimizer


class LARS(PerParameter):
    """LARS: the update of a parameter w with gradient g, equation 6 and algorithm 1 of the paper::

        g <- g + weight_decay * w
        rate <- trust_coefficient * |w| / |g|  (1 if adapt=False or a norm is zero)
        v <- momentum * v + rate * g
        w <- w - lr * v

    With ``classic_momentum`` lr multiplies g instead of v, which differs while lr changes. ``|g|``
    includes weight decay, as in the code of SimCLR and BYOL; with ``separate_norms`` it is the norm
    of the gradient alone plus weight_decay * |w|. With ``clip_lr`` the rate is min(rate / lr, 1),
    so that the effective rate never exceeds lr.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        clip_lr: bool = False,
        classic_momentum: bool = False,
        separate_norms: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "clip_lr": clip_lr,
            "adapt": True,
        }
        self.classic_momentum = classic_momentum
        self.separate_norms = separate_norms
        super().__init__(params, defaults)

    def update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        grad = self._adapt(weight, grad, group)
        inside, outside = (group["lr"], 1.0) if self.classic_momentum else (1.0, group["lr"])
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        velocity = state["momentum"].mul_(group["momentum"]).add_(grad, alpha=inside)
        weight.add_(velocity, alpha=-outside)

    def _adapt(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the gradient with weight decay, scaled by the layer's rate."""
        decayed = grad.add(weight, alpha=group["weight_decay"])
        if not group["adapt"]:
            return decayed
        if self.separate_norms:
            norm = grad.norm() + group["weight_decay"] * weight.norm()
        else:
            norm = decayed.norm()
        return decayed * self._rate(weight.norm(), norm, group)

    def _rate(self, weight_norm: Tensor, grad_norm: Tensor, group: dict[str, Any]) -> Tensor:
        rate = group["trust_coefficient"] * weight_norm / grad_norm
        rate = torch.where((weight_norm > 0) & (grad_norm > 0), rate, torch.ones_like(rate))
        if group["clip_lr"]:
            rate = (rate / max(group["lr"], 1e-12)).clamp(max=1.0)
        return rate


@register_optimizer("lars")
@dataclass(frozen=True, kw_only=True)
class LARSConfig(FieldArguments):
    """LARS; weights are adapted, biases and norms use the plain learning rate."""

    optimizer = LARS
    layerwise: ClassVar[bool] = True  # groups with adapt=False are handled separately

    sgd_momentum: float = setting(0.9, of="schedules", min=0, below=1)
    """Momentum."""
    trust_coefficient: float = setting(1e-3, above=0)
    """Trust coefficient, eta in the paper; SimCLR and BYOL use 1e-3, solo-learn's CIFAR 2e-2."""
    clip_lr: bool = False
    """Whether to limit the rate to the global lr (LARC's clip mode)."""
    classic_momentum: bool = False
    """Whether lr multiplies the gradient (paper, SimCLR) instead of the velocity (BYOL)."""
    separate_norms: bool = False
    """Whether the rate is divided by ``|g| + weight_decay * |w|`` (paper, solo-learn) instead of
    ``|g + weight_decay * w|`` (SimCLR, BYOL).
    """
