"""Any optimizer of torch.optim, by its class name: ``torch:NAdam``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from selftask.config.torch_names import torch_optimizer


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer:
    """An optimizer of torch.optim with arguments as in its signature."""

    name: str  # torch:NAME
    args: dict[str, Any] = field(default_factory=dict)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch_optimizer(self.name, self.args, groups)
