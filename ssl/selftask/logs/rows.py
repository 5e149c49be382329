"""Read and write rows of ``metrics.jsonl`` and small JSON files."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

from selftask.errors import RunError, masked
from selftask.files.paths import exists
from selftask.files.received import open_regular, read_bytes
from selftask.files.replace import replacing

RESERVED_COLUMNS = ("step", "epoch", "loss", "lr")
"""Columns of a row that no term of a loss, logged value or metric may replace."""


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line; a resume truncates it to its checkpoint."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise RunError if it is not writable."""
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)  # unbuffered, so that `close` cannot fail
        except OSError as error:
            raise RunError(f"{path}: {error.strerror or error}") from error
        self.length = self._file.tell()  # in bytes; checkpoints save it

    def write(self, row: dict[str, Any]) -> None:
        """Append one row.

        Raises:
            RunError: If it cannot be written, such as on a full disk, or if ``check_place`` fails.
        """
        self.check_place()
        line = json_row(row).encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise RunError(
                f"{self.path}: a row could not be written: {error.strerror or error}"
            ) from error
        self.length += written
        if written != len(line):
            raise RunError(f"{self.path}: a row was written in part only: the disk is full")

    def check_place(self) -> None:
        """Raise RunError if the file was removed, replaced or changed by another process.

        A new run may have taken the folder, and the checkpoints of both would mix. A file with
        another inode number is accepted if its size is right, since some network file systems
        change these numbers.
        """
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is not None and there.st_size == self.length:
            return
        ours = os.fstat(self._file.fileno())
        if ours.st_size != self.length:
            raise RunError(
                f"{self.path}: has {ours.st_size} bytes, and this run wrote {self.length}: it was "
                "changed meanwhile; start the same command again once nothing else writes to it"
            )
        if there is None or not os.path.samestat(there, ours):
            raise RunError(
                f"{self.path}: was moved, removed or replaced while this run wrote it, perhaps "
                "with its folder; start the same command again once no other run uses the folder"
            )

    def cut(self, length: int) -> int:
        """Truncate the file to ``length`` bytes, as saved in a checkpoint.

        If it is shorter, as in a copy of a running run, it is cut after its last complete row.

        Returns:
            The number of bytes that are missing up to ``length``; 0 if there are none.
        """
        kept = self.path.read_bytes()[:length].rfind(b"\n") + 1
        os.truncate(self.path, kept)
        self.length = self._file.seek(0, os.SEEK_END)
        return length - kept

    def close(self) -> None:
        self._file.close()


def json_row(row: dict[str, Any]) -> str:
    """Return a row as JSON on one line, without a newline.

    Floats, also those in dicts, are rounded to 9 significant digits; NaN and infinity become null.
    """
    columns = [f"{_quoted(name)}: {_to_json(value)}" for name, value in row.items()]
    return f"{{{', '.join(columns)}}}"


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row in one write, so that lines of several processes are not mixed.

    Passwords in addresses are masked. If the last write was cut off, such as by a full disk, the
    row begins on a line of its own.

    Raises:
        OSError: If it cannot be written.
    """
    line = masked(json_row(row)).encode() + b"\n"
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def utc_now() -> str:
    """Return the present date and time in UTC, such as ``2026-11-23T04:05:06+00:00``."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl`` up to the first line that is not JSON.

    Raises:
        OSError: If the file is missing or cannot be read.
    """
    rows = []
    with open_regular(path) as file:
        lines = file.read().split(b"\n")
    for line in lines[: -1 if not lines[-1] else None]:
        try:
            rows.append(json.loads(line))
        except ValueError:  # includes UnicodeDecodeError
            break
    return rows


def parse_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Parse one JSON object per line; skip blank and damaged lines.

    Returns:
        The objects, and the number of damaged lines. A last line without a newline may be
        incomplete while it is written, and does not count as damaged.
    """
    rows, damaged = [], 0
    *lines, last = content.split(b"\n")
    with suppress(ValueError, RecursionError):  # parsing all lines at once is twice as fast
        if not last and all(map(_is_dict, objects := json.loads(b"[" + b",".join(lines) + b"]"))):
            return objects, 0
    for line in (*lines, last):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # includes UnicodeDecodeError
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip() and line is not last:
            damaged += 1
    return rows, damaged


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def format_row(row: dict[str, Any]) -> str:
    """Format a row as ``step 50  epoch 1.25  loss 4.12  812 images/s  data_wait 3%``.

    Columns that ``is_shown`` excludes are in ``metrics.jsonl`` only.
    """
    return "  ".join(
        [show(value, name) for name, value in row.items() if (show := _format_of(name)) is not None]
    )


@cache
def _format_of(name: str) -> Callable[[Any, str], str] | None:
    """Return the function that formats a column for the log; None if it is not shown."""
    return _FORMATS.get(name, _format_plain) if is_shown(name) else None


def is_shown(name: str) -> bool:
    """Return whether a column is shown in the log, rather than in ``metrics.jsonl`` only."""
    return name not in FILE_ONLY and not name.startswith(("lr/", "activations/"))


def _format_plain(value: Any, name: str) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


_FORMATS: dict[str, Callable[[Any, str], str]] = {
    "data_wait": lambda value, _: f"data_wait {100 * value:.0f}%",
    "images_per_s": lambda value, _: f"{value:,.0f} images/s",
    "eta_s": lambda value, _: f"eta {timedelta(seconds=round(value))}",
    "device_memory_mb": lambda value, _: f"device_memory {value / 1024:.1f} GiB",
}

FILE_ONLY = {
    *("loss_median", "step_s", "step_s_median", "memory_mb", "weight_decay", "chance_loss"),
    *("device_reserved_mb", "device_memory_now_mb", "device_reserved_now_mb", "eta_recent_s"),
}

SECTIONS = ("read", "forward", "loss", "backward", "reduce", "update", "hooks")
"""Sections of a step that ``hooks.timing`` measures, in the columns ``ms_SECTION``."""

MEASURED = (
    *("images_per_s", "data_wait", "step_s", "step_s_median", "eta_s", "eta_recent_s"),
    *("memory_mb", "device_memory_mb", "device_reserved_mb"),
    *("device_memory_now_mb", "device_reserved_now_mb"),
    *("eval_s", "eval_images_per_s"),
)


def is_measured(name: str) -> bool:
    """Return whether a column is a time or memory measurement, which differs between equal runs."""
    return name in MEASURED or name.startswith("ms_")  # ms_: columns of hooks.timing


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small JSON file atomically, with passwords in addresses masked.

    If the disk has no room for another file, the file is overwritten in place.

    Raises:
        OSError: If it cannot be written.
    """
    text = masked(json.dumps(content, indent=2)) + "\n"
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _overwrite(path, text.encode()):
            raise


def _overwrite(path: Path, content: bytes) -> bool:
    """Overwrite a file within its allocated blocks; return False if they do not suffice."""
    if not exists(path) or len(content) > path.stat().st_blocks * 512:  # the unit of st_blocks
        return False
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty dict if it is missing or has no valid object.

    Raises:
        UnreadableFile: If it is not a regular file, or larger than 8 MiB.
        OSError: If it cannot be read.
    """
    if not exists(path):
        return {}
    try:
        content = read_bytes(path)
    except FileNotFoundError:  # removed in the meantime
        return {}
    with suppress(ValueError, RecursionError):
        if isinstance(values := json.loads(content), dict):
            return values
    return {}


_quoted = cache(json.dumps)


def _to_json(value: Any) -> str:
    if type(value) is float and math.isfinite(value):  # a third of the time of `json.dumps`
        text = f"{value:.9g}"
        return text if "." in text or "e" in text else f"{text}.0"
    if type(value) is int:
        return str(value)
    return json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
