"""RMSprop (Tieleman and Hinton, lecture 6.5 of Neural Networks for Machine Learning, 2012)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.registry import register_optimizer


@register_optimizer("rmsprop")
@dataclass(frozen=True, kw_only=True)
class RMSprop(FieldArguments):
    """torch.optim.RMSprop; gradients are divided by the root of their mean square."""

    optimizer = torch.optim.RMSprop

    alpha: float = setting(0.99, min=0, below=1)
    """Decay of the mean square of the gradient."""
    eps: float = setting(1e-8, min=0)
    """Term added to the denominator for numerical stability."""
    sgd_momentum: float = setting(0.0, of="schedules", min=0, below=1)
    """Momentum of the normalized gradients; 0: none."""
    centered: bool = False
    """Whether to normalize by the variance: the squared mean gradient is subtracted."""
