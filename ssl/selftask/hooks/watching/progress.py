"""A live progress bar on a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from selftask.hooks.base import ReleasedAtEnd, Task
from selftask.logs.stages import Stage
from selftask.registry import register_hook


@register_hook("progress")
@dataclass(eq=False, kw_only=True)
class ProgressBar(ReleasedAtEnd):
    """Shows a progress bar: steps, remaining time, epoch, loss and speed.

    The bar is updated at most four times a second and reads nothing from the device: loss and speed
    are those of the last row. Does nothing without a terminal or on ranks other than the first.
    """

    priority: ClassVar[int] = 75

    def __post_init__(self) -> None:
        self.stage: Stage | None = None
        self.row: dict[str, Any] = {}  # the last one of training

    def on_start(self, task: Task) -> None:
        name = "train" if task.loss.outputs_logits else "pretrain"
        self.stage = Stage(name, task.length.total_steps, done=task.steps_done)
        self._update(self.stage, task)
        self.stage.draw()

    def on_step(self, task: Task) -> None:
        if self.stage is not None and self.stage.is_due and task.train:
            self._update(self.stage, task)

    def on_row(self, task: Task) -> None:
        if "loss" in task.last_row:  # not in rows of evaluations
            self.row = task.last_row

    def _update(self, stage: Stage, task: Task) -> None:
        text = f"epoch {task.clock.batch / task.length.batches_per_epoch:.1f}"
        if self.row:
            text += f"  loss {self.row['loss']:.3f}  {self.row['images_per_s']:,.0f} images/s"
        stage.update(task.steps_done, text)

    def release(self) -> None:
        if self.stage is not None:
            self.stage.close()
            self.stage = None
