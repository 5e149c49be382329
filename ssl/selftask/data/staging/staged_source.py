"""Sources that read from copies of their files (``data.stage_to``) and name the originals."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from selftask.data.reading.files import BadImage, read_bytes
from selftask.data.reading.progress_log import say
from selftask.data.reading.storage import FileStat, find_files
from selftask.data.source import Source, Wrapped
from selftask.data.sources.files import FileSource
from selftask.data.staging.copies import THREADS, copy_files, copy_path, folder_for
from selftask.data.subset import Subset
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
    """Copy the files of a source and return a source that reads the copies.

    If each image is a file, only the images of a subset are copied.

    Args:
        source: The original.
        stage_to: A folder, or ``ram``.

    Raises:
        UserError: If the files of the source are not known, or ``copy_files`` fails.
    """
    folder = folder_for(stage_to)
    inner = source.source if isinstance(source, Subset) else source
    if isinstance(inner, FileSource):
        return LocalFiles(source, inner, folder)
    if not isinstance(inner, InFiles):
        raise UserError(
            f"data.stage_to: a {type(inner).__name__} source cannot be copied: the files it reads "
            "are not known; folders, lists, tables, arrays, tar, HDF5 and LMDB files can be"
        )
    copy_files(find_files(inner.files(), "data.stage_to"), folder)
    inner.use_copies(partial(copy_path, folder))
    return source


class LocalFiles(Wrapped):
    """A source of image files that reads their copies, or the original if there is no copy."""

    def __init__(self, source: Source, files: FileSource, folder: Path) -> None:
        super().__init__(source)
        self.files = files  # the source, or the one that it is a subset of
        self.folder = folder
        with ThreadPoolExecutor(max_workers=THREADS) as pool:
            stats = list(pool.map(_stat, _paths(source)))
        distinct = {file.path: file for file in stats if file is not None}
        copy_files(list(distinct.values()), folder)
        left_out = sum(file is None for file in stats)
        if left_out:
            say(f"{left_out} paths are not files: they cannot be copied, nor read")

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image = self._copied(self.source.path(index))
        if image is None:
            return self.source[index]
        return self.source.cut(index, image), self.label_of(index)

    def extra(self, index: int, name: str) -> Any:
        image = None
        if self.extras[name] == "image":
            image = self._copied(self.source.extra_path(index, name))
        return self.source.extra(index, name) if image is None else image

    def _copied(self, path: str) -> np.ndarray | None:
        """Return the image in the copy of a file, or None if there is no copy."""
        try:
            data = read_bytes(copy_path(self.folder, path))
        except BadImage:
            return None
        return self.files.decode(data, path)

    def describe(self) -> str:
        """Return a line such as ``1108 images, 20 folders, 0 unreadable; copied to /scratch``."""
        return f"{self.source.describe()}; copied to {self.folder}"


def _paths(source: Source) -> Iterator[str]:
    """Yield the paths of all images of a source, further ones of its samples too."""
    yield from map(source.path, range(len(source)))
    for name, kind in source.extras.items():
        if kind == "image":
            yield from (source.extra_path(index, name) for index in range(len(source)))


def _stat(path: str) -> FileStat | None:
    """Return a regular file, or None if it is missing or something else, such as a pipe."""
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
