"""A live progress bar on a terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from selftask.distributed.collectives import is_primary
from selftask.hooks.base import Hook
from selftask.logs import draw_over
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task

REFRESHES_PER_S = 4


@register_hook("progress")
@dataclass(eq=False, kw_only=True)
class ProgressBar(Hook):
    """Shows a progress bar: steps, epoch, remaining time, loss and speed.

    The bar moves four times a second but reads nothing from the device: loss and speed are those of
    the last row. Without a terminal, or on other ranks, it does nothing.
    """

    priority: ClassVar[int] = 75

    def __post_init__(self) -> None:
        self.bar: Any = None

    def on_start(self, task: Task) -> None:
        if is_primary() and sys.stdout.isatty():
            self._open(task)

    def _open(self, task: Task) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]:.1f}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            refresh_per_second=REFRESHES_PER_S,
        )
        total = task.length.total_steps
        self.line = self.bar.add_task("", total=total, numbers="", **_progress(task))
        self.due = 0.0
        self.bar.start()
        draw_over(self.bar.console)

    def on_step(self, task: Task) -> None:
        if self.bar is not None and task.train and time.monotonic() >= self.due:
            self._update(task)  # takes 10 us, so only as often as it is drawn

    def on_row(self, task: Task) -> None:
        row = task.last_row
        if self.bar is not None and "loss" in row:  # not of an evaluation
            numbers = f"loss {row['loss']:.3f}  {row['images_per_s']:,.0f} images/s"
            self.bar.update(self.line, numbers=numbers, **_progress(task))

    def _update(self, task: Task) -> None:
        self.bar.update(self.line, **_progress(task))
        self.due = time.monotonic() + 1 / REFRESHES_PER_S

    def on_end(self, task: Task) -> None:
        if self.bar is not None:
            self._update(task)
        self._close()

    def on_exception(self, task: Task) -> None:
        self._close()

    def _close(self) -> None:
        if self.bar is not None:
            draw_over(None)
            self.bar.stop()
            self.bar = None


def _progress(task: Task) -> dict[str, Any]:
    """Return steps and epoch for the bar. After a resume they do not start at zero."""
    epoch = task.clock.batch / task.length.batches_per_epoch
    return {"completed": task.steps_done, "epoch": epoch}
