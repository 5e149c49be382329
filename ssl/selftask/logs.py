"""Logging: lines on the console and in ``log.txt``, rows in ``metrics.jsonl``."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from selftask.errors import RunError
from selftask.files.paths import exists

LOGGER = logging.getLogger("selftask")
_TIME = "%Y-%m-%d %H:%M:%S"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; it has no handlers until ``start_log``."""
    return logging.getLogger(name if name.startswith("selftask") else f"selftask.{name}")


def start_log(folder: Path, rank: int) -> None:
    """Set up logging of a run.

    Rank 0 logs to the console and ``log.txt``, other ranks to ``log_rankN.txt`` only.

    Args:
        folder: The run folder.
        rank: Rank of this process.
    """
    stop_log()
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    name = "log.txt" if rank == 0 else f"log_rank{rank}.txt"
    file = _LogFile(folder / name, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s", _TIME))
    LOGGER.addHandler(file)
    if rank == 0:
        LOGGER.addHandler(_Console())


class _FromRoot(logging.Handler):
    """Forwards a package's messages on the root logger to selftask's handlers."""

    def __init__(self, package: str) -> None:
        super().__init__(logging.INFO)
        self.package = package

    def emit(self, record: logging.LogRecord) -> None:
        if self.package in Path(record.pathname).parts:
            for handler in LOGGER.handlers:
                handler.handle(record)


def show_root_lines_of(package: str) -> None:
    """Log a package's messages on the root logger, until ``stop_log``."""
    root = logging.getLogger()
    if not any(isinstance(handler, _FromRoot) for handler in root.handlers):
        root.addHandler(_FromRoot(package))
        root.setLevel(min(root.level, logging.INFO))


def stop_log() -> None:
    """Flush and close what ``start_log`` opened."""
    root = logging.getLogger()
    for other in [other for other in root.handlers if isinstance(other, _FromRoot)]:
        root.removeHandler(other)
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        with suppress(OSError):  # a full disk was reported at the write
            handler.close()


@contextmanager
def info_on_stderr() -> Iterator[None]:
    """Context that logs INFO lines to stderr, for commands that print results to stdout."""
    handler, level = logging.StreamHandler(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def add_line(folder: Path, line: str) -> None:
    """Append a line to ``log.txt`` from a process that reports for a dead rank 0.

    Args:
        folder: The run folder.
        line: Text without time.
    """
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime(_TIME)} {line}\n")


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which a failing standard stream does not end the run.

    Writes fail after a pipe or terminal is closed, or if a disk is full. The log file is separate.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Lasting(stream) for stream in before)  # type: ignore[assignment]
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
        except (OSError, ValueError) as error:  # ValueError: closed
            self._redirect()
            LOGGER.warning("%s is lost (%s); the run goes on", self._stream.name, error)
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
    """A log file that reports a failed write in one line instead of a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        print(f"{self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


class _Console(logging.Handler):
    """Prints lines, through the console of the progress bar if there is one."""

    bar: Any = None  # a rich Console

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if self.bar is not None:
            self.bar.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stdout, flush=True)


def draw_over(console: Any) -> None:
    """Print log lines through the rich console of a live display, or plainly if it is None."""
    _Console.bar = console


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line; a resume truncates it to its checkpoint."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise RunError if it is not writable."""
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)  # unbuffered, so `close` cannot fail
        except OSError as error:
            raise RunError(f"{path}: {error.strerror or error}") from error

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; raise RunError if it cannot be written, such as on a full disk."""
        line = json_row(row).encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise RunError(
                f"{self.path}: a row could not be written: {error.strerror or error}"
            ) from error
        if written != len(line):
            raise RunError(f"{self.path}: a row was written in part only: the disk is full")

    @property
    def length(self) -> int:
        """Number of bytes written so far, which checkpoints save."""
        return self._file.tell()

    def cut(self, length: int) -> None:
        """Truncate the file to ``length`` bytes, as saved in a checkpoint."""
        size = os.path.getsize(self.path)
        if length < size:
            os.truncate(self.path, length)
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def json_row(row: dict[str, Any]) -> str:
    """Return a row as one line of JSON; floats have 9 digits, and non-finite ones become null."""
    return json.dumps({name: _plain(value) for name, value in row.items()})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl`` without an incomplete last line."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def format_row(row: dict[str, Any]) -> str:
    """Format a row as ``step 50  epoch 1.25  loss 4.12  812 images/s  data_wait 3%``."""
    parts = []
    for name, value in row.items():
        if name == "data_wait":
            parts.append(f"data_wait {100 * value:.0f}%")
        elif name == "images_per_s":
            parts.append(f"{value:,.0f} images/s")
        else:
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join(parts)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty dict if it is missing or damaged."""
    if not exists(path):
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
