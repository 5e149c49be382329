"""Parts of files that are here or behind any fsspec address (``s3://``, ``hf://``, ``https://``)."""

from __future__ import annotations

import io
import os
import stat
from collections import OrderedDict
from typing import Any, BinaryIO, NamedTuple, cast

from selftask.data.reading.files import (
    BadImage,
    check_size,
    is_transient,
    now_reading,
    with_retries,
)
from selftask.data.sources.glob_pattern import expand_braces, is_pattern, match_files, no_match
from selftask.data.sources.packages import require
from selftask.errors import UserError, nearest_path
from selftask.files.paths import exists

MAX_OPEN = 64  # local files that a process keeps open: opening is slow on network file systems
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
_OPEN: OrderedDict[str, io.FileIO] = OrderedDict()  # of this process alone, the last used last


class FileStat(NamedTuple):
    """A file, and what changes when its content does."""

    path: str
    size: int  # bytes; -1 where the store does not say
    stamp: str  # time of the last change, or an ETag


def is_remote(path: str) -> bool:
    """Whether a path is an address that fsspec is asked about."""
    return "://" in path


def find_files(patterns: list[str], key: str) -> list[FileStat]:
    """The files of all patterns, in the order of the patterns and sorted within each.

    Raises UserError, about the config's ``key``, for a pattern that matches nothing and for a
    file that is not there.
    """
    found: list[FileStat] = []
    for pattern in patterns:
        find = _find_remote if is_remote(pattern) else _find_local
        found += find(os.path.expanduser(pattern), key)
    if len({file.path for file in found}) < len(found):
        raise UserError(f"{key}: the same file is named twice")
    return found


def open_file(path: str) -> BinaryIO:
    """A file opened for reading and seeking; the caller closes it."""
    if is_remote(path):
        store, inside = _store(path)
        return cast(BinaryIO, store.open(inside, "rb"))
    return open(path, "rb")


def read_part(path: str, offset: int, size: int, name: str) -> bytes:
    """``size`` bytes of a file from ``offset`` on; raises BadImage, about ``name``."""
    now_reading(name)

    try:
        check_size(size)
    except OSError as error:
        raise BadImage(name, str(error.strerror)) from error

    def read(path: str) -> bytes:
        if is_remote(path):
            store, inside = _store(path)
            return cast(bytes, store.cat_file(inside, start=offset, end=offset + size))
        return os.pread(_opened(path).fileno(), size, offset)

    def may_pass(error: Exception) -> bool:
        """A distant store may answer the next time, unless it says that there is no such file."""
        final = isinstance(error, FileNotFoundError | PermissionError)
        return not final and (is_remote(path) or is_transient(error))

    data = with_retries(read, path, name, may_pass)
    if len(data) < size:
        raise BadImage(name, f"cut off: {len(data)} of {size} bytes are there")
    return data


def _opened(path: str) -> io.FileIO:
    """The file, kept open; who still reads from one that is let go keeps it open, too."""
    file = _OPEN.pop(path, None) or io.FileIO(path)
    _OPEN[path] = file
    if len(_OPEN) > MAX_OPEN:
        _OPEN.popitem(last=False)
    return file


os.register_at_fork(after_in_child=_OPEN.clear)


def _find_local(pattern: str, key: str) -> list[FileStat]:
    matches = is_pattern(pattern) and not exists(pattern)
    found = match_files(pattern) if matches else [pattern]
    if not found:
        raise UserError(f"{key}: {no_match(pattern)}")
    return [stat_file(path, key) for path in found]


def stat_file(path: str, key: str) -> FileStat:
    """A file that is here; raises UserError, about ``key``, for one that is not."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"{key}: no such file: {path}; {nearest_path(path)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{key}: {path} is a folder or a device, a file is expected")
    return FileStat(path, status.st_size, str(status.st_mtime_ns))


def _find_remote(pattern: str, key: str) -> list[FileStat]:
    require("fsspec", "data", "addresses such as s3://bucket/x.tar")
    found: list[FileStat] = []
    for address in expand_braces(pattern):
        store, inside = _store(address)
        try:
            if is_pattern(address):
                listed = store.glob(inside, detail=True)
                infos = [listed[name] for name in sorted(listed)]
            else:
                infos = [store.info(inside)]
        except Exception as error:  # each file system behind fsspec has errors of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{key}: {address} cannot be read: {reason}") from error
        if not infos:
            raise UserError(f"{key}: no file matches {address}")
        found += [_of_info(store, info) for info in infos if info["type"] == "file"]
    return found


def _of_info(store: Any, info: dict[str, Any]) -> FileStat:
    stamp = next((info[key] for key in _STAMPS if info.get(key) is not None), "")
    size = info.get("size")
    return FileStat(store.unstrip_protocol(info["name"]), -1 if size is None else size, str(stamp))


def _store(path: str) -> tuple[Any, str]:
    """fsspec's file system of an address, of this process, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        store, inside = url_to_fs(path)
    except (ImportError, ValueError) as error:  # a protocol that needs a package, or is none
        raise UserError(f"data: {path}: {error}") from error
    return store, inside
