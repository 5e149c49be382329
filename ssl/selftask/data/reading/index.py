"""Index files with lists of paths: written once, then memory-mapped by all runs and workers.

An index file has a short header, followed by a few arrays. Only the header is read when it is
opened: this takes less than a millisecond for a million paths. The arrays take no private memory,
because all processes share the pages of the file.

If the file cannot be written, or the list is short, the same arrays stay in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selftask.data.reading.path_table import PathTable
from selftask.data.reading.progress_log import log_progress
from selftask.distributed.heartbeat import activity
from selftask.files.cache_dir import cache_path, take_lock
from selftask.files.replace import replacing
from selftask.logs import get_logger

MIN_INDEXED = 20_000  # shortest list, in paths, that is saved
UNSURE = -1  # in place of a modification time that is too recent; equals no other time
MAGIC = b"selftask paths 4"
_ALIGN = 64  # bytes
_GRANULE_S = 3.0  # resolution of the coarsest file system clock, with a margin

log = get_logger(__name__)


@dataclass(frozen=True)
class Index:
    """List of paths with labels and other arrays.

    Training needs only ``paths`` and ``labels``. Modification times in ``arrays`` and
    ``header`` let the next run detect changes.
    """

    header: dict[str, Any]  # "num_folders" (with files), and keys that depend on the kind of list
    arrays: dict[str, np.ndarray]  # arrays of PathTable, "labels" if known, and others
    file: Path | None = None  # file that the arrays are mapped from

    def __len__(self) -> int:
        return len(self.arrays["offsets"]) - 1

    @property
    def paths(self) -> PathTable:
        return PathTable(self.arrays)

    @property
    def labels(self) -> np.ndarray | None:
        """Labels, int64 (N,), -1 for a path without one; None if no path has a label."""
        return self.arrays.get("labels")

    @property
    def passed_over(self) -> dict[str, int]:
        """Number of unsupported images and archives that are not read, by extension."""
        counts: Counter[str] = Counter()
        for _, extension, number in self.header.get("passed_over", ()):
            counts[extension] += number
        return dict(counts)


# -- files -----------------------------------------------------------------------------------------


def index_file(kind: str, path: str, *more: str) -> Path:
    """Return the path of the index of a folder or file, in the cache folder.

    Args:
        kind: Kind of the list, which becomes the extension of the index.
        path: The folder or file.
        *more: Options that the content of the index depends on.
    """
    name = "\0".join([kind, os.path.realpath(path), *more])
    digest = hashlib.blake2b(os.fsencode(name), digest_size=12).hexdigest()
    return cache_path() / "index" / f"{digest}.{kind}"


def cached(
    file: Path,
    state: Callable[[], list[list[Any]]],
    make: Callable[[], Index],
    *,
    always: bool = False,
) -> Index:
    """Return the index in a file if its content is up to date; otherwise make it.

    If another process is making a long index, wait for it.

    Args:
        file: File of the index.
        state: Returns size and modification time of each file that the index is made from.
        make: Makes the index.
        always: Save the new index even if it is short, since making it is expensive. Changes
            within the resolution of the clock are then not detected. Otherwise only an index of at
            least ``MIN_INDEXED`` paths is saved.
    """
    now = state()
    if (current := _load_current(file, now)) is not None:
        return current
    with contextlib.ExitStack() as stack:
        is_long = always or sum(size for size, *_ in now) > MIN_INDEXED
        alone = not is_long or stack.enter_context(only_one(file))
        theirs = None if alone else _load_current(file, state())
        if theirs is not None:
            return theirs
        started, now = time.time_ns(), state()
        if not always:
            now = [[size, settled(changed, started)] for size, changed in now]
        index = make()
        index.header["state"] = now
        return save(index, file) if always or len(index) >= MIN_INDEXED else index


def _load_current(file: Path, state: list[list[Any]]) -> Index | None:
    index = load(file)
    return index if index is not None and index.header["state"] == state else None


def load(file: Path) -> Index | None:
    """Memory-map the index in a file; None if it is missing, damaged or of another version."""
    try:
        with open(file, "rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if data[: len(MAGIC)] != MAGIC:
            return None
        size = int.from_bytes(data[-8:], "little")
        header = json.loads(data[-8 - size : -8])
        arrays: dict[str, np.ndarray] = {
            name: np.ndarray(shape, kind, data, offset)
            for name, (kind, shape, offset) in header.pop("arrays").items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged, or cut off
        return None  # missing, of another version, or damaged: the caller makes it again
    return Index(header, arrays, file)


def save(index: Index, file: Path) -> Index:
    """Write the index and memory-map it; if it cannot be written, warn and keep it in memory.

    The file is replaced atomically: other processes see either the old or the new file.
    """
    try:
        write(index, file)
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


def write(index: Index, file: Path) -> None:
    """Write an index atomically; raises OSError.

    The file has a magic number, arrays aligned to _ALIGN bytes, the header, and its length.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary, open(temporary, "wb") as stream:
        stream.write(MAGIC)
        table: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for name, values in index.arrays.items():
            array = np.ascontiguousarray(values)
            stream.write(bytes(-stream.tell() % _ALIGN))
            table[name] = (array.dtype.str, array.shape, stream.tell())
            stream.write(array.data.cast("B") if array.size else b"")
        text = json.dumps({**index.header, "arrays": table}).encode()
        stream.write(text + len(text).to_bytes(8, "little"))
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def only_one(file: Path) -> Iterator[bool]:
    """Context manager for making ``file`` in only one process at a time.

    The lock belongs to the kernel and ends with its process. If the file system has no locks (some
    network file systems) or is read-only, all processes get True.

    Yields:
        True if no other process held the lock. False if this process had to wait: the file may be
        there now, or the other process may have failed.
    """
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(file.with_suffix(".lock"), "w"))
            alone = take_lock(lock)
        except OSError:
            alone = True  # no locks or no writing, see above
        if not alone:
            log_progress("waiting for another process, which lists the same images")
            while not take_lock(lock):
                # a heartbeat, since the wait may be longer than the hang timeout
                with activity("waiting for the list of images"):
                    time.sleep(0.1)
        yield alone


def settled(mtime_ns: int, read_ns: int) -> int:
    """Return the modification time to save; UNSURE if it is too recent to be reliable.

    Clocks of file systems are coarse: a second change within the same tick has the same time.

    Args:
        mtime_ns: Modification time of a file or folder, in nanoseconds.
        read_ns: Current time just before ``mtime_ns`` was read, in nanoseconds.
    """
    return mtime_ns if read_ns - mtime_ns > _GRANULE_S * 1e9 else UNSURE
