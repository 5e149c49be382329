"""Sharpness-aware minimization: two gradients per step.

Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021,
arXiv:2010.01412. Adaptive: Kwon et al., ASAM, ICML 2021, arXiv:2102.11600.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from selftask.batch import total
from selftask.config.fields import setting
from selftask.hooks.gradients.trained import updated_parameters
from selftask.optim.gradients import total_norm
from selftask.registry import register_train_step
from selftask.task import Task
from selftask.task.second_pass import second_pass
from selftask.task.update import apply_gradients, compute_gradients, forward


@register_train_step("sam")
@dataclass(frozen=True, kw_only=True)
class SAM:
    """Update with the gradient at approximately the worst weights within a radius (SAM)."""

    rho: float = setting(0.05, above=0)
    """Radius, eq. 2; 0.5 to 2 is usual with ``adaptive``."""
    adaptive: bool = False
    """Whether the radius is relative to each weight (ASAM)."""

    def __call__(self, task: Task) -> None:
        """Update with the gradient at the weights moved by ``rho`` along the first gradient.

        Both gradients are means over ranks. Teachers, memories, BatchNorm statistics and logs use
        the first forward pass only; ``on_backward`` sees the second gradient. Both passes have the
        same dropout draws. A test phase stops after the loss.
        """
        batch = task.last_batch = next(task.batches)
        forward(task, batch)
        if not task.train:
            return

        compute_gradients(task, batch.local_loss)
        with self._perturbed(task):
            with second_pass(task.base_model), task.autocast():
                perturbed_loss = total(task.loss(task.model(batch.input), batch))
            compute_gradients(task, perturbed_loss)
        apply_gradients(task)

    @contextmanager
    @torch.no_grad()
    def _perturbed(self, task: Task) -> Iterator[None]:
        """Context in which ``rho * g / ||g||`` (eq. 2, or as in ASAM) is added to the weights.

        The weights are restored on exit. The scale of the loss (``train.grad_scaler``) cancels.
        """
        weights: list[Any] = [p for p in updated_parameters(task) if p.grad is not None]
        before = [p.detach().clone() for p in weights]
        relative = [p.abs() * p.grad if self.adaptive else p.grad for p in weights]
        length = self.rho / total_norm(relative).clamp(min=1e-12)
        for weight, direction, start in zip(weights, relative, before, strict=True):
            weight += length * (start.abs() * direction if self.adaptive else direction)
        try:
            with torch.enable_grad():
                yield
        finally:
            for weight, start in zip(weights, before, strict=True):
                weight.copy_(start)
