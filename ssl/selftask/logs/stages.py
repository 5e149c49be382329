"""Live progress lines on a terminal, one for each active stage (scan, pretrain, evaluate, ...).

They are not drawn if stdout is a pipe or a file, on a dumb terminal, with ``--quiet``, or on ranks
other than 0; the log has the same information. ``NO_COLOR`` is respected. Does not import torch,
and imports rich only if a line is drawn.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from selftask.distributed.world import read_world
from selftask.logs.lines import draw_over
from selftask.logs.verbosity import is_quiet

T = TypeVar("T")

REFRESHES_PER_S = 4
_DELAY_S = 0.5  # shorter stages are not drawn
_DUMB = ("dumb", "unknown", "")


def can_draw() -> bool:
    """Return True on rank 0 if stdout can redraw lines and the output is not quiet."""
    return (
        sys.stdout is not None  # a script without a console
        and sys.stdout.isatty()
        and os.environ.get("TERM", "") not in _DUMB
        and not is_quiet()
        and read_world().rank == 0
    )


class Stage:
    """A live progress line, drawn after 0.5 s if ``can_draw()`` is True. The caller must close it.

    Args:
        name: One word, such as ``scan``.
        total: Value of ``done`` at which the stage is finished; None if unknown.
        done: Initial progress.
    """

    def __init__(self, name: str, total: float | None = None, *, done: float = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self.text = ""
        self.opened = time.monotonic()
        self.due = self.opened + (_DELAY_S if can_draw() else float("inf"))
        self.line: Any = None  # a rich Task

    def update(self, done: float | None = None, text: str | None = None) -> None:
        """Set the progress and the text after the bar; None keeps the present value.

        The line is updated at most four times a second.
        """
        self.done = self.done if done is None else done
        self.text = self.text if text is None else text
        if self.is_due:
            self.due = time.monotonic() + 1 / REFRESHES_PER_S
            _DISPLAY.draw(self)

    def draw(self) -> None:
        """Draw the line now, without the initial delay."""
        self.due -= _DELAY_S
        self.update()

    @property
    def is_drawn(self) -> bool:
        """True if the line is visible."""
        return self.line is not None

    @property
    def is_due(self) -> bool:
        """True if the next update is drawn; otherwise callers can skip preparing it."""
        return time.monotonic() >= self.due

    def close(self) -> None:
        """Remove the line."""
        self.due = float("inf")
        _DISPLAY.remove(self)


@contextmanager
def stage(name: str, total: float | None = None, *, at_once: bool = False) -> Iterator[Stage]:
    """Context that shows the progress line of a stage.

    Args:
        name: One word, such as ``scan``.
        total: Value of ``done`` at which the stage is finished; None if unknown.
        at_once: Draw the line immediately, for stages that do not report progress.
    """
    opened = Stage(name, total)
    try:
        if at_once:
            opened.draw()
        yield opened
    finally:
        opened.close()


def staged(name: str, items: Iterable[T], total: float | None = None) -> Iterator[T]:
    """Yield the items, and count them in a live line.

    Args:
        name: Name of the stage, one word.
        items: Items to iterate over.
        total: Number of items; None if unknown.
    """
    with stage(name, total) as line:
        for number, item in enumerate(items, 1):
            yield item
            line.update(number)


class _Display:
    """Display of the lines of all open stages; rich supports one live display at a time.

    A thread redraws it four times a second and prints log lines above it, so that training does
    not wait for a redraw.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all lines. A forked child must do so, since it lacks the drawing thread."""
        draw_over(None)
        self.progress: Any = None
        self.lock = threading.RLock()  # folders are scanned by several threads
        self.waiting: deque[tuple[str, str | None]] = deque()  # lines of the log, and their colors
        self.over = threading.Event()

    def draw(self, stage: Stage) -> None:
        with self.lock:
            if self.progress is None:
                self._start()
            if stage.line is None:
                shown = {"total": stage.total, "completed": stage.done, "text": stage.text}
                number = self.progress.add_task(stage.name, **shown)
                stage.line = next(t for t in self.progress.tasks if t.id == number)
                stage.line.start_time = stage.opened
                self.progress.refresh()
            self.progress.update(stage.line.id, completed=stage.done, text=stage.text)

    def remove(self, stage: Stage) -> None:
        with self.lock:
            if stage.line is None or self.progress is None:
                return
            self.print()
            self.progress.remove_task(stage.line.id)
            if not self.progress.tasks:
                self.over.set()
                draw_over(None)
                self.print()  # lines logged in between
                self.progress.stop()
                self.progress = None

    def print(self) -> None:
        """Print the waiting lines of the log, above those of the stages."""
        with self.lock:
            lines = [self.waiting.popleft() for _ in range(len(self.waiting))]
            if self.progress is None:
                for line, _ in lines:
                    print(line, flush=True)
            elif lines:
                from rich.text import Text

                text = Text("\n").join(Text(line, style=color or "") for line, color in lines)
                self.progress.console.print(text, soft_wrap=True)

    def _start(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            _count_column(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[text]}"),
            auto_refresh=False,
            get_time=time.monotonic,
            transient=True,
        )
        self.progress.start()
        draw_over(self)
        self.over = threading.Event()
        threading.Thread(target=self._redraw, args=(self.over,), daemon=True).start()

    def _redraw(self, over: threading.Event) -> None:
        while not over.wait(1 / REFRESHES_PER_S):
            with self.lock:
                if not over.is_set():
                    self.print()
                    self.progress.refresh()


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
os.register_at_fork(after_in_child=_DISPLAY.reset)
