"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from selftask.config.fields import setting
from selftask.registry import register_optimizer


@register_optimizer("sgd")
@dataclass(frozen=True, kw_only=True)
class SGD:
    """torch.optim.SGD, with momentum; weight decay is added to the gradient."""

    sgd_momentum: float = setting(0.9, of="schedules", min=0, below=1)
    """Momentum of the gradients; 0: none."""
    nesterov: bool = False
    """Whether to use Nesterov momentum."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.nesterov and not self.sgd_momentum:
            yield "nesterov: true; needs momentum: set sgd_momentum above 0"

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        sharded = any(hasattr(p, "device_mesh") for group in groups for p in group["params"])
        optimizer = torch.optim.SGD(
            groups,
            momentum=self.sgd_momentum,
            nesterov=self.nesterov,
            fused=not sharded,  # torch has no fused step for DTensors (FSDP)
        )
        if self.sgd_momentum:
            # torch's fused step needs momentum buffers for all parameters or for none. A layer that
            # is frozen at first (DINO's last layer, SwAV's prototypes) would get its buffer later.
            # Start all buffers at zero, as torch does.
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
