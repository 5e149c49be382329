"""Text files with one path per line and optional labels; read once, then memory-mapped.

A label follows the path after a tab. The file is read in pieces. Most pieces have no labels, blank
lines or trailing spaces. They are used unchanged, without a Python object per line.
"""

from __future__ import annotations

import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from selftask.data.reading import index as store
from selftask.data.reading.class_numbers import number_labels
from selftask.data.reading.index import Index
from selftask.data.reading.path_table import in_no_folder, split_bytes
from selftask.data.reading.progress_log import ScanProgress
from selftask.errors import UserError
from selftask.logs.stages import stage

PIECE = 1 << 24  # bytes
_BLANKS = b" \t\r\x0b\x0c"  # stripped from the end of a line
_NOT_PLAIN = re.compile(rb"\t|[ \r\x0b\x0c]\n|\n\n|^\n")


def read_list(path: str) -> Index:
    """Return the paths and labels of a text file, from its index if the file has not changed.

    ``header["first_line"]`` is the line number of the first path, counted from 1; 0 if the file has
    no path.

    Raises:
        UserError: If only some lines have a label, or the file cannot be read.
    """
    try:
        file = store.index_file("list", path)
        return store.cached(file, lambda: [_state(path)], lambda: _Reading(path).index())
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror or error}") from error


def _state(path: str) -> list[int]:
    """Return size and modification time of the file."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


class _Reading:
    """Parser of a list."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._line = 0  # lines read so far
        self._first_line = 0  # first line with a path; 0: none yet
        self._has_labels = False  # whether the first path has a label
        self._numbers: dict[bytes, int] = {}  # number of each label, by first occurrence
        self._labels: list[np.ndarray] = []
        self._folders: set[bytes] = set()

    def index(self) -> Index:
        """Parse the whole list."""
        joined = bytearray()
        with stage("scan") as line, open(self._path, "rb") as file:
            progress = ScanProgress(self._path, line)
            if file.read(len(BOM_UTF8)) != BOM_UTF8:  # byte order mark, which some editors write
                file.seek(0)
            for piece in _pieces(file):
                paths = self._take_lines(piece) if _NOT_PLAIN.search(piece) else self._take(piece)
                self._folders |= {path.rpartition(b"/")[0] for path in paths.split(b"\n")[:-1]}
                progress.add(paths.count(b"\n"))
                joined += paths
        names = np.frombuffer(joined, dtype=np.uint8)
        arrays = in_no_folder(names, split_bytes(names, b"\n"))
        header: dict[str, Any] = {"num_folders": len(self._folders), "first_line": self._first_line}
        if self._has_labels:
            labels = [os.fsdecode(label) for label in self._numbers]
            numbers, header["classes"] = number_labels(labels)
            arrays["labels"] = numbers[np.concatenate(self._labels)]
        return Index(header, arrays)

    def _take(self, piece: bytes) -> bytes:
        """Count the lines of a piece that has only paths, and return it unchanged."""
        if self._has_labels:
            raise self._mixed(self._line + 1)
        self._first_line = self._first_line or self._line + 1
        self._line += piece.count(b"\n")
        return piece

    def _take_lines(self, piece: bytes) -> bytes:
        """Parse a piece line by line, and return its paths, each followed by a newline."""
        paths, labels = [], []
        for line in piece.split(b"\n")[:-1]:
            self._line += 1
            if not line.strip(_BLANKS):
                continue
            path, tab, label = line.rstrip(_BLANKS).partition(b"\t")
            if not self._first_line:
                self._first_line, self._has_labels = self._line, bool(tab)
            if bool(tab) != self._has_labels:
                raise self._mixed(self._line)
            paths.append(path + b"\n")
            if tab:
                labels.append(self._numbers.setdefault(label.strip(), len(self._numbers)))
        self._labels.append(np.array(labels, dtype=np.int64))
        return b"".join(paths)

    def _mixed(self, line: int) -> UserError:
        return UserError(
            f"data: {self._path}:{line}: some lines have a label after a tab, others do not"
        )


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file in pieces of whole lines; the last piece also ends with a newline."""
    rest = b""
    while piece := file.read(PIECE):
        lines, newline, piece = piece.rpartition(b"\n")
        if newline:
            yield rest + lines + newline
            rest = piece
        else:
            rest += piece
    if rest:
        yield rest + b"\n"
