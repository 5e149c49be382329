"""Lists of paths on disk: written once, then mapped by every run, rank and worker.

A file of a list of N paths holds a few arrays behind a short header. Opening it reads the header
and nothing else, so that a million paths are open in less than a millisecond and cost a process no
memory of its own: the pages are those of the file, shared by all who look at them.

Where it cannot be written, the same arrays stay in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from selftask.data.reading.progress_log import say
from selftask.data.source import PathTable
from selftask.distributed.heartbeat import activity
from selftask.errors import UserError
from selftask.files.cache_dir import cache_path, take_lock
from selftask.logs import get_logger

MIN_INDEXED = 20_000  # paths; shorter lists are not saved
UNSURE = -1  # a modification time that equals no other, for what has just changed
MAGIC = b"selftask paths 3"
_ALIGN = 64  # bytes
_GRANULE_S = 3.0  # the coarsest clock of a file system, with a margin

log = get_logger(__name__)


@dataclass(frozen=True)
class Index:
    """A list of paths with labels and other arrays.

    ``paths`` and ``labels`` are all that training needs; ``arrays`` and ``header`` also say when
    things were looked at, for the next run to see what has changed since.
    """

    header: dict[str, Any]  # "num_folders" and keys of the kind of list
    arrays: dict[str, np.ndarray]  # those of PathTable, "labels" if known, and others
    file: Path | None = None  # that they are mapped from

    def __len__(self) -> int:
        return len(self.arrays["offsets"]) - 1

    @property
    def paths(self) -> PathTable:
        return PathTable.of_arrays(self.arrays) if self.file is None else StoredPaths(self)

    @property
    def labels(self) -> np.ndarray | None:
        """Labels, int64 (N,), -1: none; None if no path has a label."""
        return self.arrays.get("labels")

    @property
    def passed_over(self) -> dict[str, int]:
        """Number of image-like files that are not read, by extension."""
        counts: Counter[str] = Counter()
        for _, extension, number in self.header.get("passed_over", ()):
            counts[extension] += number
        return dict(counts)

    @property
    def num_folders(self) -> int:
        """Number of folders with at least one of the files."""
        return int(self.header["num_folders"])


class StoredPaths(PathTable):
    """Paths in an index file; pickled as the name of the file, which the receiver maps."""

    def __init__(self, index: Index) -> None:
        self.__dict__.update(PathTable.of_arrays(index.arrays).__dict__)
        self.labels = index.labels
        self._file, self._stamp = index.file, index.header["stamp"]

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._file, self._stamp)


def _reopen(file: Path, stamp: str) -> PathTable:
    index = load(file)
    if index is None or index.header["stamp"] != stamp:
        raise UserError(f"data: the index {file} was replaced just now; start again")
    return index.paths


# -- files -----------------------------------------------------------------------------------------


def index_file(kind: str, path: str, *more: str) -> Path:
    """Return the path of the index of a folder or file, in the cache folder."""
    name = "\0".join([kind, os.path.realpath(path), *more])
    digest = hashlib.blake2b(os.fsencode(name), digest_size=12).hexdigest()
    return cache_path() / "index" / f"{digest}.{kind}"


def load(file: Path) -> Index | None:
    """Map the index in a file; None if it is missing or unreadable."""
    try:
        with open(file, "rb") as stream:
            start = stream.read(len(MAGIC) + 8)
            if len(start) < len(MAGIC) + 8 or not start.startswith(MAGIC):
                return None
            text = stream.read(int.from_bytes(start[len(MAGIC) :], "little"))
            header = json.loads(text)
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            arrays = {
                name: np.frombuffer(data, dtype=kind, count=count, offset=offset)
                for name, (kind, count, offset) in header.pop("arrays").items()
            }
    except (OSError, ValueError, KeyError):
        return None  # of another version, or damaged: it is made again
    return Index(header, arrays, file)


def save(index: Index, file: Path) -> Index:
    """Write the index and map it; if it cannot be written, warn once and keep it in memory.

    Whoever reads at the same time sees the old file or the new one, whole.
    """
    stamped = replace(index, header={**index.header, "stamp": secrets.token_hex(8)})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with open(descriptor, "wb") as stream:
                _write(stream, stamped)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        log.warning(
            "data: the list of %s images cannot be kept for the next run: %s: %s "
            "(SELFTASK_CACHE=DIR names another place)",
            f"{len(index):,}",
            file.parent,
            error.strerror or error,
        )
        return index
    return load(file) or index


def _write(stream: Any, index: Index) -> None:
    """Write magic, header length, header, and arrays aligned to _ALIGN bytes."""
    table: dict[str, tuple[str, int, int]] = {}
    end = 0
    arrays = {name: np.ascontiguousarray(array) for name, array in index.arrays.items()}
    for name, array in arrays.items():
        table[name] = (array.dtype.str, len(array), end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    room = len(json.dumps({**index.header, "arrays": table})) + 20 * len(table) + 64
    first = -(-(len(MAGIC) + 8 + room) // _ALIGN) * _ALIGN
    table = {name: (kind, count, first + at) for name, (kind, count, at) in table.items()}
    text = json.dumps({**index.header, "arrays": table}).encode()
    text += b" " * (first - len(MAGIC) - 8 - len(text))
    stream.write(MAGIC + len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        stream.write(array.data.cast("B") if len(array) else b"")
        stream.write(bytes(-array.nbytes % _ALIGN))


@contextlib.contextmanager
def only_one(file: Path) -> Iterator[bool]:
    """Context for making ``file``: True if nobody else does, False after the other ended.

    The lock is the kernel's and ends with its process. Where there are no locks (some network file
    systems), or no writing, everybody is alone.
    """
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(file.with_suffix(".lock"), "w"))
            alone = take_lock(lock)
        except OSError:
            alone = True  # as said above
        if not alone:
            say("waiting for another process, which lists the same images")
            while not take_lock(lock):
                with activity("waiting for the list of images"):  # which may take longer than
                    time.sleep(0.1)  # a process without signs of life is given
        yield alone


def settled(mtime_ns: int, looked_ns: int) -> int:
    """Return the modification time to save; UNSURE if it is too recent to be reliable.

    Clocks of file systems are coarse: a second change within the same tick would not show.
    """
    return mtime_ns if looked_ns - mtime_ns > _GRANULE_S * 1e9 else UNSURE
