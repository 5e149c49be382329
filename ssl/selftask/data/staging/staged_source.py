"""Sources that read copies of their files (``data.stage_to``) but report the original paths."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, runtime_checkable

from selftask.data.reading.progress_log import log_progress
from selftask.data.reading.storage import FileStat, find_files
from selftask.data.source import Source, Wrapped
from selftask.data.sources.files import FileSource
from selftask.data.staging.copies import THREADS, copy_files, copy_path, folder_for
from selftask.errors import UserError
from selftask.files.addresses import is_remote


@runtime_checkable
class InFiles(Protocol):
    """Protocol of sources that read images from inside larger files, such as tar or HDF5."""

    def files(self) -> list[str]:
        """Return the paths or addresses of the files."""

    def use_copies(self, copy_of: Callable[[str], str]) -> None:
        """Read from ``copy_of(path)`` instead of each file or folder from now on."""


def copied(source: Source, stage_to: str) -> Source:
    """Copy the files of a source, make it read the copies, and return it.

    If each image is a file and ``source`` is a subset, only the images of the subset are copied.

    Args:
        source: Source; it, or the innermost source that it wraps, is modified in place.
        stage_to: Value of ``data.stage_to``: a folder, or ``ram``.

    Raises:
        UserError: If the files of the source are not known, or ``copy_files`` fails.
    """
    folder = folder_for(stage_to)
    inner = source
    while isinstance(inner, Wrapped):
        inner = inner.source
    if isinstance(inner, FileSource):
        files = _files_of(source)
    elif isinstance(inner, InFiles):
        files = find_files(inner.files(), "data.stage_to")
    else:
        raise UserError(
            f"data.stage_to: a {type(inner).__name__} source cannot be copied: the files it reads "
            "are not known; folders, lists, tables, arrays, tar, HDF5 and LMDB files can be"
        )
    copy_files(files, folder)
    inner.use_copies(partial(copy_path, folder))
    return source


def _files_of(source: Source) -> list[FileStat]:
    """Return the files of a source that has a file for each image."""
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        stats = list(pool.map(_stat, _paths(source)))
    if left_out := stats.count(None):
        log_progress(f"{left_out} paths are not files: they cannot be copied, nor read")
    return list({file.path: file for file in stats if file is not None}.values())


def _paths(source: Source) -> Iterator[str]:
    """Yield the paths of all images of a source, including those in extra fields."""
    yield from map(source.path, range(len(source)))
    for name, kind in source.extras.items():
        if kind == "image":
            yield from (source.extra_path(index, name) for index in range(len(source)))


def _stat(path: str) -> FileStat | None:
    """Return the FileStat of a file; None if it is missing, unreadable or not a regular file."""
    if is_remote(path):
        (file,) = find_files([path], "data.stage_to")
        return file
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode) or not os.access(path, os.R_OK):
        return None
    return FileStat(path, status.st_size, str(status.st_mtime_ns))
