"""Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.registry import register_optimizer


@register_optimizer("adamw")
@dataclass(frozen=True, kw_only=True)
class AdamW(FieldArguments):
    """torch.optim.AdamW; weight decay is decoupled from the gradient."""

    optimizer = torch.optim.AdamW
    options: ClassVar[dict[str, Any]] = {"fused": True}

    betas: tuple[float, float] = setting((0.9, 0.999), of="schedules", min=0, below=1)
    """Decay of the first and second moment."""
    eps: float = setting(1e-8, min=0)
    """Term added to the denominator for numerical stability."""
