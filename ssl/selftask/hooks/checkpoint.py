"""Save checkpoints at regular intervals and at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from selftask.config.values.duration import steps_in
from selftask.hooks.base import Hook
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task


@register_hook("checkpoint")
@dataclass(eq=False, kw_only=True)
class SaveCheckpoints(Hook):
    """Saves a checkpoint every ``train.checkpoint_every``.

    A save due at the end of a phase comes after the phase's other hooks (evaluations, k-means), so
    that a resume neither repeats nor skips them.
    """

    priority: ClassVar[int] = 90

    def on_start(self, task: Task) -> None:
        self.every = max(1, steps_in(task.config.train.checkpoint_every, task.length))
        self.saved_at = task.steps_done

    def on_step(self, task: Task) -> None:
        if task.train and self._due(task) and not task.phase_finished:
            self._save(task)

    def on_phase_end(self, task: Task) -> None:
        if task.train and (self._due(task) or task.clock.done):
            self._save(task)

    def _due(self, task: Task) -> bool:
        return task.steps_done // self.every > self.saved_at // self.every

    def _save(self, task: Task) -> None:
        task.save_checkpoint()
        self.saved_at = task.steps_done
