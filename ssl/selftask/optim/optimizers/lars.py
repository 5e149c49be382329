"""LARS, layer-wise adaptive rate scaling for large batches (You et al., arXiv:1708.03888)."""

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


class LARS(PerGroup):
    """LARS: the update of a parameter w with gradient g, equation 6 and algorithm 1 of the paper::

        g <- g + weight_decay * w
        rate <- trust_coefficient * |w| / |g|  (1 if adapt=False or a norm is zero)
        v <- momentum * v + rate * g
        w <- w - lr * v

    With ``classic_momentum`` lr multiplies g instead of v; the results differ only if lr changes.
    ``|g|`` includes weight decay, as in the code of SimCLR and BYOL; with ``separate_norms`` it is
    the norm of the gradient alone plus weight_decay * |w|. With ``clip_lr`` the rate is
    min(rate / lr, 1), so that the effective rate never exceeds lr.
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

    def update_group(self, weights: list[Tensor], grads: list[Tensor], group: Any) -> None:
        velocities = local_parts(self.states(weights, "momentum"))
        decay = group["weight_decay"]
        steps = list(torch._foreach_add(local_parts(grads), local_parts(weights), alpha=decay))
        if group["adapt"]:
            rates = self._rates(weights, grads, steps, group)
            torch._foreach_mul_(steps, list(rates.unbind()))
        inside, outside = (group["lr"], 1.0) if self.classic_momentum else (1.0, group["lr"])
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps, alpha=inside)
        torch._foreach_add_(local_parts(weights), velocities, alpha=-outside)

    def _rates(
        self, weights: list[Tensor], grads: list[Tensor], steps: list[Tensor], group: dict[str, Any]
    ) -> Tensor:
        """Return the factor of each gradient with weight decay, (T,).

        Args:
            weights: Parameters.
            grads: Their gradients.
            steps: This rank's shards of the gradients with weight decay.
            group: The parameter group.
        """
        of_weights = whole_norms(weights)
        if self.separate_norms:
            of_grads = whole_norms(grads) + group["weight_decay"] * of_weights
        else:
            of_grads = whole_norms(steps, shards_of=weights)
        rates = group["trust_coefficient"] * of_weights / of_grads
        rates = torch.where((of_weights > 0) & (of_grads > 0), rates, 1.0)
        return (rates / max(group["lr"], 1e-12)).clamp(max=1.0) if group["clip_lr"] else rates


@register_optimizer("lars")
@dataclass(frozen=True, kw_only=True)
class LARSConfig(FieldArguments):
    """LARS; weights are adapted, biases and norms use the plain learning rate."""

    optimizer = LARS
    layerwise: ClassVar[bool] = True  # groups with adapt=False are handled separately

    sgd_momentum: float = setting(0.9, of="schedules", min=0, below=1)
    """Momentum of the velocity v; 0: none."""
    trust_coefficient: float = setting(1e-3, above=0)
    """Trust coefficient, eta in the paper; SimCLR and BYOL use 1e-3, solo-learn's CIFAR 2e-2."""
    clip_lr: bool = False
    """Whether to limit the effective rate of each weight to lr (LARC's clip mode)."""
    classic_momentum: bool = False
    """Whether lr multiplies the gradient (paper, SimCLR) instead of the velocity (BYOL)."""
    separate_norms: bool = False
    """Whether the rate is divided by ``|g| + weight_decay * |w|`` (paper, solo-learn) instead of
    ``|g + weight_decay * w|`` (SimCLR, BYOL).
    """
