"""Early stopping: end a run whose metric has stopped improving or has reached a target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from selftask.config.fields import setting
from selftask.hooks.base import Hook, Task
from selftask.hooks.watching.watched_metric import WatchedMetric
from selftask.logs.direction import Mode, direction
from selftask.registry import register_hook


@register_hook("early_stopping")
@dataclass(eq=False, kw_only=True)
class EarlyStopping(Hook):
    """Ends the run, as finished, if a metric has not improved for ``patience`` rows.

    Only rows with the metric count. The run also ends when the metric reaches ``target``. It ends
    as usual, with evaluation, export and checkpoint.
    """

    priority: ClassVar[int] = 30

    metric: str = "knn_top1"
    """Any column of metrics.jsonl, such as ``val_loss``."""
    mode: Mode = "auto"
    """Which values are good. max: large ones; min: small ones; auto: by the name of the metric,
    small ones for losses, errors and distances.
    """
    patience: int = setting(5, min=1)
    """Number of consecutive rows without improvement after which the run ends."""
    min_delta: float = setting(0.0, min=0)
    """An improvement counts if it is larger than this."""
    target: float | None = setting(None, also=["stopping_threshold"])
    """Value of the metric at which the run ends; null: none."""

    def on_start(self, task: Task) -> None:
        self.direction = direction("hooks.early_stopping.mode", self.mode, self.metric)
        self.watched = WatchedMetric("hooks.early_stopping.metric", self.metric)
        self.best: float | None = self.loaded.get("best")
        self.best_step: int = self.loaded.get("best_step", 0)
        self.waited: int = self.loaded.get("waited", 0)
        self._stop_if_done(task)

    def on_row(self, task: Task) -> None:
        value = self.watched.value(task)
        if value is None:
            return
        if self._improves(value):
            self.best, self.best_step, self.waited = value, task.steps_done, 0
        else:
            self.waited += 1
        self._stop_if_done(task)

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None or self._is_enough(value):
            return True
        gain = value - self.best
        return (gain if self.direction == "max" else -gain) > self.min_delta

    def _is_enough(self, value: float | None) -> bool:
        if self.target is None or value is None:
            return False
        return value >= self.target if self.direction == "max" else value <= self.target

    def _stop_if_done(self, task: Task) -> None:
        if task.clock.done:  # the last evaluation comes after the last step
            return
        if self._is_enough(self.best):
            task.clock.stopped = (
                f"stopped early: {self.metric} was {self._shown()} at step {self.best_step}, "
                f"target {self.target:.4g}"
            )
        elif self.waited >= self.patience:
            task.clock.stopped = (
                f"stopped early: {self.metric} was best at step {self.best_step} "
                f"({self._shown()}), {self.waited} evaluations before the end"
            )

    def _shown(self) -> str:
        return "never a number" if self.best is None else f"{self.best:.4g}"

    def on_end(self, task: Task) -> None:
        if self.best is None and not self.waited:
            self.watched.warn_if_missing("no row had it")

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self, "waited"):
            return {}
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}
