"""Save checkpoints at regular intervals, when a metric is best, and at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from selftask.checkpoint.kept import Kept
from selftask.checkpoint.rotation import checkpoints, step_of
from selftask.config.values.duration import steps_in
from selftask.distributed.collectives import is_primary
from selftask.hooks.base import Hook, Task
from selftask.hooks.watching.watched_metric import WatchedMetric
from selftask.logs import get_logger
from selftask.logs.direction import direction
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("checkpoint")
@dataclass(eq=False, kw_only=True)
class SaveCheckpoints(Hook):
    """Saves a checkpoint every ``train.checkpoint_every``, and at the end of training.

    Checkpoints selected by ``train.keep_best`` and ``train.keep_every`` are also saved. A save due
    at the end of a phase comes after the phase's other hooks (evaluations, k-means), so that a
    resume neither repeats nor skips them.
    """

    priority: ClassVar[int] = 90

    def on_start(self, task: Task) -> None:
        train = task.config.train
        self.wanted = train.keep_best
        self.every = max(1, steps_in(train.checkpoint_every, task.length))
        self.forever = 0  # period in steps; 0: no checkpoint is kept forever
        if train.keep_every is not None:
            self.forever = max(1, steps_in(train.keep_every, task.length))
        self.saved_at = task.steps_done
        self.is_best = False  # whether a row of this step has a value to keep
        name = self.wanted.metric
        self.metric = WatchedMetric("train.keep_best.metric", name, is_known=name in task.history)
        self.kept = self._resumed(task)
        task.checkpoints.kept = self.kept

    def _resumed(self, task: Task) -> Kept:
        """Return the checkpoints to keep, from the resumed state and ``kept.json``."""
        folder = task.checkpoints.folder
        sources = [Kept.read(folder)]  # may have a newer value of the last step than the state
        if self.loaded:
            sources.insert(0, Kept.of(self.loaded).only(map(step_of, checkpoints(folder))))
        kept = Kept(metric=self.wanted.metric)
        if self.wanted.metric is not None:
            mode = direction("train.keep_best.mode", self.wanted.mode, self.wanted.metric)
            kept = replace(kept, mode=mode)
        for source in sources:
            kept = replace(kept, every=tuple(sorted({*kept.every, *source.every})))
            if (source.metric, source.mode) == (kept.metric, kept.mode):
                for step, value in source.best:
                    kept = kept.with_value(step, value, self.wanted.count)
        return kept

    def on_row(self, task: Task) -> None:
        if not task.steps_done:  # an evaluation before training, and before on_start
            return
        value = self.metric.value(task)
        if value is not None and math.isfinite(value):
            better = self.kept.with_value(task.steps_done, value, self.wanted.count)
            self.is_best |= task.steps_done in dict(better.best)
            self.kept = better

    def on_step(self, task: Task) -> None:
        if task.train and self._due(task) and not task.phase_finished:
            self._save(task)

    def on_phase_end(self, task: Task) -> None:
        after_test = self.is_best or task.clock.stopped
        if (task.train or after_test) and (self._due(task) or task.clock.done):
            self._save(task)

    def on_end(self, task: Task) -> None:
        """Update which checkpoints are kept: the final evaluation runs after the last save."""
        if is_primary():
            task.checkpoints.keep_now(self.kept)
        self.metric.warn_if_missing()

    def _due(self, task: Task) -> bool:
        regular = task.steps_done // self.every > self.saved_at // self.every
        return regular or self.is_best or self._is_kept(task.steps_done)

    def _is_kept(self, step: int) -> bool:
        return bool(self.forever) and step % self.forever == 0

    def _save(self, task: Task) -> None:
        step = task.steps_done
        if self._is_kept(step) and step not in self.kept.every:
            self.kept = replace(self.kept, every=(*self.kept.every, step))
        task.checkpoints.kept = self.kept
        task.save_checkpoint()
        self.saved_at, self.is_best = step, False
        self.metric.warn_if_missing()

    def state_dict(self) -> dict[str, Any]:
        kept = getattr(self, "kept", None)
        return kept.to_dict() if kept is not None and kept.steps else {}
