"""Histograms of weights and gradients, for writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from selftask.config.fields import setting
from selftask.hooks.base import Task
from selftask.hooks.gradients.trained import trained_parameters
from selftask.hooks.writers.media import MediaHook
from selftask.registry import register_hook

SAMPLES = 65_536  # maximum number of values in a parameter's histogram


@register_hook("histograms")
@dataclass(eq=False, kw_only=True)
class Histograms(MediaHook):
    """Sends histograms of weights and gradients to writers as ``weights/NAME``, ``gradients/NAME``.

    Weights are taken before the step, gradients before clipping. A large parameter is represented
    by evenly spaced values, a sharded one by rank 0's shard. Needs a writer that takes histograms
    (``tensorboard``, ``wandb``).
    """

    priority: ClassVar[int] = 15  # before clip_gradients
    every: int | str = setting("300 steps", duration=True, min=1)
    """Time between histograms; they are taken in the next logged step."""

    def on_backward(self, task: Task) -> None:
        if not self.is_due(task):
            return
        for name, parameter in trained_parameters(task):
            task.log_histogram(f"weights/{name}", spaced(parameter))
            if parameter.grad is not None:
                task.log_histogram(f"gradients/{name}", spaced(parameter.grad))


def spaced(values: Any) -> Tensor:
    """Return a 1-D copy of at most ``SAMPLES`` evenly spaced values of a tensor or its shard."""
    local: Tensor = values.to_local() if hasattr(values, "to_local") else values
    flat = local.detach().flatten()
    return flat[:: -(-flat.numel() // SAMPLES) or 1].clone()
