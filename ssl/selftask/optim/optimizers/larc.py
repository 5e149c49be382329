"""LARC, apex's variant of LARS, which also adapts norms and biases.

You et al., Large Batch Training of Convolutional Networks, arXiv:1708.03888, equation 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.optim.gradients import whole_norms
from selftask.optim.optimizers.lars import LARS
from selftask.registry import register_optimizer


class LARC(LARS):
    """LARC without clipping: the update of a parameter w with gradient g in apex's LARC with SGD::

        rate <- trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        g <- rate * (g + weight_decay * w)
        v <- momentum * v + g
        w <- w - lr * v

    A parameter with zero norm, or with a gradient of zero norm, is neither adapted nor decayed.
    """

    def __init__(self, params: Any, *, eps: float = 1e-8, **defaults: Any) -> None:
        self.eps = eps
        super().__init__(params, **defaults)

    def _rates(
        self, weights: list[Tensor], grads: list[Tensor], steps: list[Tensor], group: dict[str, Any]
    ) -> Tensor:
        of_weights, of_grads = whole_norms(weights), whole_norms(grads)
        rates = (
            group["trust_coefficient"]
            * of_weights
            / (of_grads + group["weight_decay"] * of_weights + self.eps)
        )
        # a gradient of zero: no weight decay
        return torch.where(of_weights > 0, rates, 1.0).where(of_grads > 0, 0.0)


@register_optimizer("larc")
@dataclass(frozen=True, kw_only=True)
class LARCConfig(FieldArguments):
    """LARC without clipping: every parameter is adapted. Used by SwAV and DeepCluster v2.

    These methods also decay every parameter: ``decay_1d: true``.
    """

    optimizer = LARC

    sgd_momentum: float = setting(0.9, of="schedules", min=0, below=1)
    """Momentum of the velocity v; 0: none."""
    trust_coefficient: float = setting(1e-3, above=0)
    """Trust coefficient, eta in the paper."""
    eps: float = setting(1e-8, above=0)
    """Term added to the denominator, so that the rate is finite for a tiny gradient."""
