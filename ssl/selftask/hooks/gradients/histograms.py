"""Distributions of weights and gradients, for writers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.config.values.duration import steps_in
from selftask.hooks.base import Hook
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task

SAMPLES = 65_536  # values of a parameter in its histogram


@register_hook("histograms")
@dataclass(eq=False, kw_only=True)
class Histograms(Hook):
    """Sends histograms to writers, as ``weights/NAME`` and ``gradients/NAME``.

    Weights are those before the step, gradients those before clipping. A large parameter is
    represented by evenly spaced values, a sharded one by rank 0's shard. Needs a writer that takes
    histograms (``tensorboard``, ``wandb``); does nothing without.
    """

    priority: ClassVar[int] = 15  # before clip_gradients
    every: int | str = setting("300 steps", duration=True, min=1)
    """Time between histograms, each at the next logged step."""

    def on_start(self, task: Task) -> None:
        self.period = max(1, steps_in(self.every, task.length))
        self.shown = -1  # period of the last histograms

    def on_backward(self, task: Task) -> None:
        if not (task.takes_media and task.should_log):
            return
        period = task.steps_done // self.period
        if period == self.shown:
            return
        self.shown = period
        for name, parameter in _trained(task):
            task.log_histogram(f"weights/{name}", spaced(parameter))
            if parameter.grad is not None:
                task.log_histogram(f"gradients/{name}", spaced(parameter.grad))


def _trained(task: Task) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that the optimizer updates, by name."""
    trained = {p for group in task.optimizer.param_groups for p in group["params"]}
    for prefix, module in task.trained:
        for name, parameter in module.named_parameters(prefix):
            if parameter in trained:
                yield name, parameter


def spaced(values: Any) -> Tensor:
    """Return a copy of at most ``SAMPLES`` evenly spaced values of a tensor, or of this shard."""
    local: Tensor = values.to_local() if hasattr(values, "to_local") else values
    flat = local.detach().flatten()
    return flat[:: -(-flat.numel() // SAMPLES) or 1].clone()
