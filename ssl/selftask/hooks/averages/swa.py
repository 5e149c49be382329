"""Equal average of the weights of the last part of the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from selftask.config.fields import setting
from selftask.config.values.duration import steps_in
from selftask.hooks.averages.weight_average import WeightAverage
from selftask.hooks.base import Task
from selftask.registry import register_hook


@register_hook("swa")
@dataclass(eq=False, kw_only=True)
class StochasticWeightAverage(WeightAverage):
    """Averages the weights equally over the last part of the training (SWA, arXiv:1803.05407).

    In the paper, the learning rate stays high during this part, and BatchNorm's statistics are
    recomputed afterwards; use ``hooks.precise_bn`` for that.
    """

    name: ClassVar[str] = "swa"

    start: int | str = setting("75 %", duration=True, min=0)
    """Time of the first weights in the average."""
    every: int | str = setting("1 epoch", duration=True, min=1)
    """Time between the weights in the average."""

    def on_start(self, task: Task) -> None:
        super().on_start(task)
        self.first = max(1, self.step_of(self.start, task))
        self.period = max(1, steps_in(self.every, task.length))
        self.seen = task.steps_done

    def on_update(self, task: Task) -> None:
        self._add_if_due(task, task.steps_done + 1)

    def on_step(self, task: Task) -> None:
        """Add the weights also if the step that is due was skipped; they are those before it."""
        if task.train and self.seen < task.steps_done:
            self._add_if_due(task, task.steps_done)

    def _add_if_due(self, task: Task, step: int) -> None:
        self.seen = step
        if step < self.first or (step - self.first) % self.period:
            return
        if not self.weights:
            self._begin(task)
        self.update(1.0 / (self.updates + 1))
