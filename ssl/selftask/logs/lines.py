"""Lines on the console and in ``log.txt``."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from selftask.distributed.world import read_world
from selftask.errors import printable
from selftask.logs.verbosity import DETAIL, console_level

LOGGER = logging.getLogger("selftask")
_TIME = "%Y-%m-%d %H:%M:%S"


def get_logger(name: str) -> logging.Logger:
    """Return the logger ``name``, or ``selftask.NAME`` for a module outside selftask.

    Its messages go to the handlers of the logger ``selftask``, which ``start_log`` adds.
    """
    is_ours = name.partition(".")[0] == "selftask"
    return logging.getLogger(name if is_ours else f"selftask.{name}")


def start_log(folder: Path, rank: int) -> None:
    """Set up logging of a run, in place of that of an earlier run in this process.

    Rank 0 logs to the console and ``log.txt``, other ranks to ``log_rankN.txt`` only. selftask's
    messages are not propagated to the root logger until ``stop_log``.

    Args:
        folder: The run folder.
        rank: Rank of this process.
    """
    stop_log()
    name = "log.txt" if rank == 0 else f"log_rank{rank}.txt"
    file = _LogFile(folder / name, LOGGER)
    LOGGER.setLevel(min(DETAIL, console_level()))
    LOGGER.propagate = False
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s", _TIME))
    LOGGER.addHandler(file)
    if rank == 0:
        LOGGER.addHandler(_Console())


class _FromRoot(logging.Handler):
    """Handler of the root logger that forwards a package's messages to selftask's handlers."""

    def __init__(self, package: str) -> None:
        super().__init__(logging.INFO)
        self.package = package
        self.root_level = logging.getLogger().level

    def emit(self, record: logging.LogRecord) -> None:
        if self.package in Path(record.pathname).parts:
            for handler in LOGGER.handlers:
                handler.handle(record)


def show_root_lines_of(package: str) -> None:
    """Also log what a package sends to the root logger, from level INFO, until ``stop_log``.

    Later calls before ``stop_log`` have no effect.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, _FromRoot) for handler in root.handlers):
        root.addHandler(_FromRoot(package))
        root.setLevel(min(root.level, logging.INFO))


def stop_log() -> None:
    """Close all log handlers of a run, and restore the earlier settings of the loggers.

    Handlers that a user has added to the logger ``selftask`` are kept.
    """
    root = logging.getLogger()
    for other in [other for other in root.handlers if isinstance(other, _FromRoot)]:
        root.removeHandler(other)
        root.setLevel(other.root_level)
    for handler in list(LOGGER.handlers):
        if not type(handler).__module__.startswith("selftask."):
            continue
        LOGGER.removeHandler(handler)
        if isinstance(handler, _LogFile):
            LOGGER.setLevel(handler.level_before)
            LOGGER.propagate = handler.propagate_before
        with suppress(OSError):  # a full disk was already reported by the failed write
            handler.close()


@contextmanager
def info_on_stderr() -> Iterator[None]:
    """Context that logs lines from level INFO to stderr, for commands that print to stdout.

    With ``--quiet``, and on ranks other than 0, it logs only errors; with ``--verbose`` also DEBUG
    lines.
    """
    handler, level = _Console("stderr"), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(console_level() if read_world().rank == 0 else logging.ERROR)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def add_line(folder: Path, line: str) -> None:
    """Append a line to ``log.txt`` from a process that reports for a dead rank 0.

    Args:
        folder: The run folder.
        line: The line without a time stamp.
    """
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime(_TIME)} {printable(line)}\n")


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which a failing standard stream does not end the run.

    Writes fail after a pipe or terminal is closed, or if a disk is full. The log file is separate.
    A stream is None in a script without a console, such as a daemon; /dev/null takes its place.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as null:
        sys.stdout, sys.stderr = (_Lasting(stream or null) for stream in before)  # type: ignore[assignment]
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream that switches to /dev/null after the first failed write, with a warning."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return int(self._tried(self._stream.write, text) or 0)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, do: Callable[..., Any], *args: Any) -> Any:
        try:
            return do(*args)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._redirect()
            LOGGER.warning("%s is lost (%s); the run continues", self._stream.name, error)
            return None

    def _redirect(self) -> None:
        """Redirect the file descriptor; otherwise the buffer fails again when Python exits."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            return
        self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until exit


class _LogFile(logging.FileHandler):
    """A log file without the lines of ``log_summary``.

    A failed write is reported on stderr in one line instead of a traceback. The handler stores the
    previous level and propagation of the logger, which ``stop_log`` restores.
    """

    def __init__(self, path: Path, logger: logging.Logger) -> None:
        super().__init__(path, encoding="utf-8")
        self.level_before, self.propagate_before = logger.level, logger.propagate

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(record, "is_summary", False) and bool(super().filter(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        print(f"{self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


class _Console(logging.Handler):
    """Logging handler that prints above the live lines of stages, or to a standard stream.

    Args:
        stream: ``stdout`` or ``stderr``: where to print while there are no live lines.
    """

    live: LiveLines | None = None

    def __init__(self, stream: str = "stdout") -> None:
        super().__init__()
        self.stream, self.least = stream, console_level()

    def filter(self, record: logging.LogRecord) -> bool:
        shown = record.levelno >= self.least or getattr(record, "is_result", False)
        return shown and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        line, color = printable(self.format(record)), _color(record.levelno)
        live = _Console.live
        if live is None:
            stream = getattr(sys, self.stream)
            print(_colored(line, color, stream), file=stream, flush=True)
            return
        live.waiting.append((line, color))
        if _Console.live is None:  # closed by another thread in the meantime
            live.print()

    def flush(self) -> None:
        """Print waiting log lines now, instead of at the next redraw."""
        if _Console.live is not None:
            _Console.live.print()


def _color(level: int) -> str | None:
    """Return the color of a line: red for errors, yellow for warnings, else None."""
    return "red" if level >= logging.ERROR else "yellow" if level >= logging.WARNING else None


def _colored(line: str, color: str | None, stream: Any) -> str:
    """Return the line in its color if the stream is a terminal with colors and NO_COLOR unset."""
    plain = color is None or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    if plain or stream is None or not stream.isatty():
        return line
    return f"\033[{31 if color == 'red' else 33}m{line}\033[0m"


class LiveLines(Protocol):
    """A display of live lines, above which lines of the log are printed."""

    waiting: deque[tuple[str, str | None]]
    """Lines to print next, and their colors."""

    def print(self) -> None:
        """Print the waiting lines now."""


def draw_over(live: LiveLines | None) -> None:
    """Set the display above which log lines are printed; None prints them directly."""
    _Console.live = live


def flush_lines() -> None:
    """Flush the handlers of the log, for a process that ends without exit handlers."""
    for handler in LOGGER.handlers:
        handler.flush()


def log_summary(lines: Iterable[str]) -> None:
    """Log lines to the console only, such as a summary of lines in ``log.txt``."""
    LOGGER.info("%s", "\n".join(lines), extra={"is_summary": True})


def log_result(line: str) -> None:
    """Log the last line of a run, which is printed even with ``--quiet``."""
    LOGGER.info("%s", line, extra={"is_result": True})
