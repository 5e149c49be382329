"""What a run says: lines on the console and in ``log.txt``, rows in ``metrics.jsonl``."""

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
    """The logger of a module; silent until a run sets it up."""
    return logging.getLogger(name if name.startswith("selftask") else f"selftask.{name}")


def start_log(folder: Path, rank: int) -> None:
    """Rank 0 speaks on the console and in ``log.txt``; the others only write ``log_rankN.txt``."""
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
        with suppress(OSError):  # what a full disk has no room for was told when it was written
            handler.close()


@contextmanager
def info_on_stderr() -> Iterator[None]:
    """Context for commands without a run: INFO lines go to stderr, and stdout keeps results."""
    handler, level = logging.StreamHandler(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def add_line(folder: Path, line: str) -> None:
    """One more line of ``log.txt``, by a process that speaks for a rank 0 which no longer can."""
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime(_TIME)} {line}\n")


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which a standard stream that can no longer be written to does not end the run.

    The reader of a pipe may leave, a terminal close, a disk be full: the log has a file of its own.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Lasting(stream) for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream that goes to /dev/null from the first failed write on, and logs it."""

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
        self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the run


class _LogFile(logging.FileHandler):
    """A file whose lines are on the console, too: a full disk is told in one line, not a stack."""

    def handleError(self, record: logging.LogRecord) -> None:
        print(f"{self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


class _Console(logging.Handler):
    """Prints lines; through the progress bar's console while there is one, so as not to tear it."""

    bar: Any = None  # a rich Console

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if self.bar is not None:
            self.bar.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stdout, flush=True)


def draw_over(console: Any) -> None:
    """Send the lines of the log through the console of a live display; None: print them plainly."""
    _Console.bar = console


class MetricsFile:
    """``metrics.jsonl``: one object a line, appended; a resume cuts it back to its checkpoint."""

    def __init__(self, path: Path) -> None:
        """Raises RunError if the file cannot be opened for writing."""
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)  # so that nothing is left to fail in `close`
        except OSError as error:
            raise RunError(f"{path}: {error.strerror or error}") from error

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. Raises RunError if it cannot be written, on a full disk for example."""
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
        """Bytes written so far: what a checkpoint remembers."""
        return self._file.tell()

    def cut(self, length: int) -> None:
        """Drop what was written after the checkpoint that remembered ``length``."""
        size = os.path.getsize(self.path)
        if length < size:
            os.truncate(self.path, length)
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def json_row(row: dict[str, Any]) -> str:
    """One line of JSON; floats with 9 digits, null for those that JSON cannot hold."""
    return json.dumps({name: _plain(value) for name, value in row.items()})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``; a half-written last line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def format_row(row: dict[str, Any]) -> str:
    """One readable line: ``step 50  epoch 1.25  loss 4.12  812 images/s  data_wait 3%``."""
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
    """Write a small JSON file so that a reader sees the old one or the new one, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """What ``write_json`` wrote; nothing where it has not, or where a power cut has emptied it."""
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
