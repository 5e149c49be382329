"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selftask.registry import register_optimizer


@register_optimizer("sgd")
@dataclass(frozen=True, kw_only=True)
class SGD:
    """torch.optim.SGD."""

    sgd_momentum: float = 0.9
    nesterov: bool = False

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # Not fused: torch's fused step fails where a layer frozen at first (DINO's last, SwAV's
        # prototypes) gets its first gradient later than the others.
        return torch.optim.SGD(groups, momentum=self.sgd_momentum, nesterov=self.nesterov)
