"""Read files with one JSON object per line, of up to 8 GiB, in bounded time and memory.

A file of up to 8 MiB is read whole. From a larger ``metrics.jsonl`` only the rows that a chart
needs are parsed, from other files only the first and last rows.
"""

from __future__ import annotations

import os
import re
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from selftask.files.received import UnreadableFile, open_regular
from selftask.logs.rows import parse_lines

WHOLE = 8 << 20  # a file of up to this many bytes is read whole
LARGEST = 8 << 30  # a larger file is not read
PARTS = 1000  # of a large file, equal in bytes; some rows of each are read
PART_BYTES = 16 << 10  # maximum bytes of evaluation rows of one part
LINE_BYTES = 64 << 10  # maximum bytes of a line; a row of hooks.activations may have 30,000
NEWEST = 100  # number of last lines that are always read
HEAD = 1 << 20  # bytes read from the start of a large file of events
_LOSS = re.compile(rb'"loss": (-?\d+\.?\d*(?:[eE][-+]?\d+)?)')
_TRAINED = b'"lr": '  # in rows of training, but not in those of evaluations


@dataclass(frozen=True)
class Lines:
    """JSON objects read from a file, and counts of its lines."""

    rows: list[dict[str, Any]]
    damaged: int = 0  # number of lines read that are not a JSON object
    lines: int = 0  # number of all lines if only some were read; 0 for a file read whole


def read_drawn_rows(path: Path) -> Lines:
    """Return the rows of a ``metrics.jsonl``; from a large file, only those that charts need.

    A file of more than 8 MiB is divided into 1000 parts of equal size. From each part, the first
    training row, the training rows with the smallest and largest loss, and evaluation rows of up to
    16 KiB together are returned. The newest 100 rows of the file are also returned.

    Raises:
        UnreadableFile: If it is not a regular file, or larger than 8 GiB.
        OSError: If it is missing or cannot be read.
    """
    with open_regular(path) as file:
        size = _checked_size(file, path)
        if size <= WHOLE:
            return Lines(*parse_lines(file.read()))
        kept: dict[int, bytes] = {}
        newest, count, offset = deque[tuple[int, bytes]](maxlen=NEWEST), 0, 0
        part, end = _Part(), size / PARTS
        # Pieces of lines longer than LINE_BYTES are not valid JSON.
        for line in iter(partial(file.readline, LINE_BYTES), b""):
            if offset >= end:
                kept |= part.chosen()
                part, end = _Part(), offset + size / PARTS
            part.add(count, line)
            newest.append((count, line))
            count, offset = count + 1, offset + len(line)
        kept |= part.chosen() | dict(newest)
    rows, damaged = parse_lines(b"".join(kept[number] for number in sorted(kept)))
    return Lines(rows, damaged, count)


def read_ends(path: Path) -> Lines:
    """Return the JSON objects of a file with one per line.

    From a file of more than 8 MiB, those in the first MiB and the last 7 MiB are returned. See
    ``read_drawn_rows`` for errors.
    """
    with open_regular(path) as file:
        size = _checked_size(file, path)
        if size <= WHOLE:
            return Lines(*parse_lines(file.read()))
        count = sum(piece.count(b"\n") for piece in iter(partial(file.read, HEAD), b""))
        file.seek(0)
        first = file.read(HEAD).rpartition(b"\n")[0]
        file.seek(size - (WHOLE - HEAD))
        last = file.read(WHOLE - HEAD).partition(b"\n")[2]
    return Lines(*parse_lines(first + b"\n" + last), count)


def _checked_size(file: BinaryIO, path: Path) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > LARGEST:
        raise UnreadableFile(path, f"is larger than {LARGEST >> 30} GiB")
    return size


@dataclass
class _Part:
    """Selection of the lines to parse from one part of a file."""

    losses: dict[float, tuple[int, bytes]] = field(default_factory=dict)
    first: tuple[int, bytes] | None = None
    evaluations: dict[int, bytes] = field(default_factory=dict)
    size: int = 0  # of the evaluations in bytes

    def add(self, number: int, line: bytes) -> None:
        if _TRAINED not in line:
            if self.size + len(line) <= PART_BYTES:
                self.evaluations[number] = line
                self.size += len(line)
            return
        self.first = self.first or (number, line)
        match = _LOSS.search(line)
        if match is None:
            return
        loss, losses = float(match[1]), self.losses
        if len(losses) < 2:
            losses.setdefault(loss, (number, line))
        elif not min(losses) <= loss <= max(losses):
            del losses[min(losses) if loss < min(losses) else max(losses)]
            losses[loss] = (number, line)

    def chosen(self) -> dict[int, bytes]:
        """Return the chosen lines by number."""
        ends = list(self.losses.values()) + ([self.first] if self.first else [])
        return {**self.evaluations, **dict(ends)}
