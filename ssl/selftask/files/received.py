"""Read untrusted files, such as the files of a received run folder.

Only regular files of bounded size are read: reading a named pipe could block forever, and a link
to /dev/zero never ends. Values are checked before they are used.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from selftask.errors import UserError, shorten

MAX_BYTES = 8 << 20  # of a file that is read whole
_LARGEST = 2**53  # up to here floats hold whole numbers exactly
_LARGEST_FLOAT = 1e100  # products of a few such numbers are finite
_LATEST_S = 32_503_680_000  # the year 3000

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnreadableFile(OSError, UserError):
    """Raised for a file that is too large, not a regular file, or has unexpected content."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: cannot be read: {self.strerror}"


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        UnreadableFile: If it is a folder, a named pipe, a device or a socket.
        OSError: If it is missing or cannot be opened.
    """
    _check_regular(path, os.stat(path).st_mode)  # opening a device may have side effects
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe does not wait
    try:
        _check_regular(path, os.fstat(handle).st_mode)  # the path may have been replaced
    except UnreadableFile:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def check_regular(path: str | Path) -> None:
    """Raise UnreadableFile if a path exists and is neither a regular file nor a folder.

    Links are followed. A path that cannot be examined is accepted.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:  # whoever opens it reports this
        return
    if not stat.S_ISDIR(mode):
        _check_regular(path, mode)


def _check_regular(path: str | Path, mode: int) -> None:
    if kind := special_kind(mode):
        raise UnreadableFile(path, f"is {kind} and not a file")


def special_kind(mode: int) -> str:
    """Return the file type of a mode in words, such as ``a folder``; empty for a regular file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


def read_bytes(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        UnreadableFile: If the file is larger, or not a regular file.
        OSError: If it is missing or cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnreadableFile(path, f"is larger than {most >> 20} MiB")
    return content


def read_json(path: str | Path, most: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of at most ``most`` bytes.

    Raises:
        UnreadableFile: If it is not a JSON object, or as ``read_bytes``.
        OSError: As ``read_bytes``.
    """
    try:
        content = json.loads(read_bytes(path, most))
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(path, f"is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise UnreadableFile(path, "is no JSON object")
    return content


@dataclass(frozen=True)
class Kind:
    """Expected kind of a value: its name in messages, and a predicate."""

    name: str
    accepts: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return True for an int of at most 2**53 or a float of at most 1e100, by absolute value.

    Arithmetic with such numbers does not overflow. The result is False for a bool.
    """
    if type(value) is int:
        return -_LARGEST <= value <= _LARGEST
    return type(value) is float and abs(value) <= _LARGEST_FLOAT


NUMBER = Kind("a number", is_number)
COUNT = Kind("a whole number", lambda v: type(v) is int and 0 <= v <= _LARGEST)
TIME = Kind("a time in seconds since 1970", lambda v: is_number(v) and 0 <= v < _LATEST_S)
TEXT = Kind("a text", lambda v: isinstance(v, str))
TEXTS = Kind("a list of texts", lambda v: isinstance(v, list) and all(map(TEXT.accepts, v)))
TABLE = Kind("a mapping", lambda v: isinstance(v, dict))
TABLE_OF_TEXTS = Kind(
    "a mapping of texts", lambda v: isinstance(v, dict) and all(map(TEXT.accepts, v.values()))
)


def drop_misfits(content: dict[str, Any], kinds: Mapping[str, Kind]) -> list[str]:
    """Remove values that are not of the expected kind, and return a message for each.

    Args:
        content: Nested values, changed in place. Missing values and None are accepted.
        kinds: Expected kinds by dotted key; outer keys before inner ones.
    """
    problems = []
    for key, kind in kinds.items():
        section: Any = content
        *outer, name = key.split(".")
        for part in outer:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or section.get(name) is None:
            continue
        if not kind.accepts(section[name]):
            problems.append(f"{key}: expected {kind.name}, not {shorten(repr(section[name]), 60)}")
            del section[name]
    return problems
