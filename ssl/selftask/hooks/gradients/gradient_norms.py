"""Norms of gradients, weights and updates by part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.hooks.base import Hook, Task
from selftask.hooks.gradients.trained import trained_parameters
from selftask.optim.gradients import gradients, total_norm
from selftask.registry import register_hook


@register_hook("gradient_norms")
@dataclass(eq=False, kw_only=True)
class GradientNorms(Hook):
    """Logs ``grad_norm/PART``, ``weight_norm/PART`` and ``update_ratio/PART`` in logged steps.

    A part is all parameters whose names have the same prefix, such as ``network.backbone``.
    Gradients are taken before clipping. The update ratio is the norm of the change of the weights
    in a step divided by their norm before the step; 1e-3 is typical. It needs a copy of the weights
    in logged steps.
    """

    priority: ClassVar[int] = 15  # before clip_gradients
    depth: int = setting(2, min=1)
    """Number of leading components of a parameter's name that define its part: 2 for
    ``network.backbone``.
    """

    def on_start(self, task: Task) -> None:
        self.parts: dict[str, list[nn.Parameter]] = {}
        for name, parameter in trained_parameters(task):
            part = ".".join(name.split(".")[:-1][: self.depth])
            self.parts.setdefault(part, []).append(parameter)
        self.before: dict[str, list[Tensor]] = {}

    def on_backward(self, task: Task) -> None:
        if not task.should_log:
            return
        for part, parameters in self.parts.items():
            task.log(f"grad_norm/{part}", total_norm(gradients(parameters)))
            self.before[part] = [p.detach().clone() for p in parameters]

    def on_update(self, task: Task) -> None:
        for part, before in self.before.items():
            weight_norm = total_norm(before)
            changes = torch._foreach_sub([p.detach() for p in self.parts[part]], before)
            task.log(f"weight_norm/{part}", weight_norm)
            task.log(f"update_ratio/{part}", total_norm(list(changes)) / weight_norm)
        self.before.clear()
