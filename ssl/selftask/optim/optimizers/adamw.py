"""Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selftask.config.fields import setting
from selftask.registry import register_optimizer


@register_optimizer("adamw")
@dataclass(frozen=True, kw_only=True)
class AdamW:
    """torch.optim.AdamW."""

    betas: tuple[float, float] = setting((0.9, 0.999), of="schedules", min=0, below=1)
    """Decay of the first and second moment."""
    eps: float = setting(1e-8, min=0)
    """Term added to the denominator for numerical stability."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=self.betas, eps=self.eps, fused=True)
