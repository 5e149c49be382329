"""Live lines on a terminal: one for each stage that is under way (scan, pretrain, evaluate, ...).

Nothing is drawn into a pipe or a file, on a dumb terminal, with ``--quiet``, or on other ranks than
the first; the lines of the log say the same there. Colours follow ``NO_COLOR``. Does not import
torch, and rich only if something is drawn.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from selftask.distributed.world import read_world
from selftask.logs.lines import draw_over
from selftask.logs.verbosity import is_quiet

T = TypeVar("T")

REFRESHES_PER_S = 4
_DELAY_S = 0.5  # a stage that is shorter is not drawn
_DUMB = ("dumb", "unknown", "")


def can_draw() -> bool:
    """Return whether stdout is a terminal on which lines can be drawn over."""
    return (
        sys.stdout.isatty()
        and os.environ.get("TERM", "") not in _DUMB
        and not is_quiet()
        and read_world().rank == 0
    )


class Stage:
    """One live line; see ``open_stage``. Calls do nothing if nothing is drawn."""

    def __init__(self, name: str, total: float | None, done: float) -> None:
        self.name, self.total, self.done = name, total, done
        self.text = ""
        self.opened = time.monotonic()
        self.due = self.opened + (_DELAY_S if can_draw() else float("inf"))
        self.line: Any = None  # a rich Task

    def update(self, done: float | None = None, text: str | None = None) -> None:
        """Set how much is done, and the text at the end of the line.

        Drawn at most four times a second, since it takes as long as all else of a step.
        """
        self.done = self.done if done is None else done
        self.text = self.text if text is None else text
        if self.is_due:
            self.due = time.monotonic() + 1 / REFRESHES_PER_S
            _DISPLAY.draw(self)

    def draw(self) -> None:
        """Draw the line without waiting until the stage has taken a while."""
        self.due -= _DELAY_S
        self.update()

    @property
    def is_drawn(self) -> bool:
        """Whether the line can be seen."""
        return self.line is not None

    @property
    def is_due(self) -> bool:
        """Whether the next update would be drawn: to leave out what an update costs."""
        return time.monotonic() >= self.due

    def close(self) -> None:
        """Remove the line."""
        self.due = float("inf")
        _DISPLAY.remove(self)


def open_stage(name: str, total: float | None = None, *, done: float = 0) -> Stage:
    """Return a line for a stage; its owner closes it.

    Args:
        name: One word, such as ``scan``.
        total: When ``done`` has reached it, the stage is finished; None if unknown.
        done: Where the stage starts.
    """
    return Stage(name, total, done)


@contextmanager
def stage(name: str, total: float | None = None, *, at_once: bool = False) -> Iterator[Stage]:
    """Context with a line for a stage.

    Args:
        name: One word, such as ``scan``.
        total: When that much is done, the stage is finished; None if unknown.
        at_once: Draw the line before anything is done, for stages that do not count.
    """
    opened = open_stage(name, total)
    try:
        if at_once:
            opened.draw()
        yield opened
    finally:
        opened.close()


def staged(name: str, items: Iterable[T], total: float | None = None) -> Iterator[T]:
    """Yield the items, counted by a line for a stage."""
    with stage(name, total) as line:
        for number, item in enumerate(items, 1):
            yield item
            line.update(number)


class _Display:
    """The lines of all open stages: rich draws one block of lines at a time."""

    def __init__(self) -> None:
        self.progress: Any = None
        self.lock = threading.RLock()  # folders are scanned by several threads

    def draw(self, stage: Stage) -> None:
        with self.lock:
            if self.progress is None:
                self._start()
            if stage.line is None:
                shown = {"total": stage.total, "completed": stage.done, "text": stage.text}
                number = self.progress.add_task(stage.name, **shown)
                stage.line = next(t for t in self.progress.tasks if t.id == number)
                stage.line.start_time = stage.opened
            self.progress.update(stage.line.id, completed=stage.done, text=stage.text)

    def remove(self, stage: Stage) -> None:
        with self.lock:
            if stage.line is None or self.progress is None:
                return
            self.progress.remove_task(stage.line.id)
            if not self.progress.tasks:
                draw_over(None)
                self.progress.stop()
                self.progress = None

    def _start(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            _count_column(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[text]}"),
            refresh_per_second=REFRESHES_PER_S,
            get_time=time.monotonic,
            transient=True,
        )
        self.progress.start()
        draw_over(self.progress.console)


def _count_column() -> Any:
    """Return a column such as ``1,200/5,000``, or ``1,200`` if the total is unknown."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Count(ProgressColumn):
        def render(self, task: Any) -> Text:
            total = "" if task.total is None else f"/{task.total:,.0f}"
            return Text(f"{task.completed:,.0f}{total}" if task.completed or total else "")

    return Count()


_DISPLAY = _Display()
