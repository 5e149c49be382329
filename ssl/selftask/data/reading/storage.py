"""Find files and read parts of them, local or remote (``s3://``, ``hf://``, ``https://``)."""

from __future__ import annotations

import io
import os
import stat
from collections import OrderedDict
from typing import BinaryIO, NamedTuple

from selftask.data.reading.files import check_size, now_reading, with_retries
from selftask.data.reading.patterns import expand_braces, is_pattern, match_files, no_match
from selftask.errors import BadImage, UserError, nearest_path, reason_of
from selftask.files import addresses
from selftask.files.addresses import is_remote
from selftask.files.paths import exists

MAX_OPEN = 64  # local files that stay open, since opening is slow on network file systems
_OPEN: OrderedDict[str, io.FileIO] = OrderedDict()  # of this process; least recently used first


class FileStat(NamedTuple):
    """Path and size of a file, and a stamp that changes with its content if the store has one."""

    path: str
    size: int  # bytes; -1 if the store does not report it
    stamp: str  # modification time or ETag; empty if the store reports neither


def find_files(patterns: list[str], key: str) -> list[FileStat]:
    """Return the files of all patterns, in the order of the patterns.

    The files of a local pattern are sorted. For an address, those of each alternative in braces are
    sorted.

    Args:
        patterns: Paths, addresses or patterns of them.
        key: Config key for error messages.

    Raises:
        UserError: If a pattern matches nothing, a file does not exist, or a file is found twice.
    """
    result: list[FileStat] = []
    for pattern in patterns:
        find = _find_remote if is_remote(pattern) else _find_local
        result += find(os.path.expanduser(pattern), key)
    if len({file.path for file in result}) < len(result):
        raise UserError(f"{key}: the same file is named twice")
    return result


def open_file(path: str) -> BinaryIO:
    """Open a local or remote file for reading and seeking; the caller must close it.

    Raises OSError for a local file, and any error of the store for a remote one.
    """
    return addresses.open_read(path) if is_remote(path) else open(path, "rb")


def read_part(path: str, offset: int, size: int, name: str) -> bytes:
    """Read one image, a byte range of a local or remote file.

    Args:
        path: Path or address of the file.
        offset: Position of the first byte.
        size: Number of bytes.
        name: Name of the image for messages.

    Raises:
        BadImage: If the part exceeds ``data.max_bytes``, cannot be read, or is truncated.
    """
    now_reading(name)

    try:
        check_size(size)
    except OSError as error:
        raise BadImage(name, str(error.strerror)) from error

    def read(path: str) -> bytes:
        if is_remote(path):
            return addresses.read_range(path, offset, size)
        try:
            return os.pread(_opened(path).fileno(), size, offset)
        except OSError:
            _OPEN.pop(path, None)  # a stale handle of NFS stays stale: a retry must open again
            raise

    data = with_retries(read, path, name)
    if len(data) < size:
        raise BadImage(name, f"cut off: {len(data)} of {size} bytes are there")
    return data


def _opened(path: str) -> io.FileIO:
    """Return a file from the cache of open files; an evicted one is closed after its last use."""
    file = _OPEN.pop(path, None) or io.FileIO(path)
    _OPEN[path] = file
    if len(_OPEN) > MAX_OPEN:
        _OPEN.popitem(last=False)
    return file


os.register_at_fork(after_in_child=_OPEN.clear)


def _find_local(pattern: str, key: str) -> list[FileStat]:
    matches = is_pattern(pattern) and not exists(pattern)
    result = match_files(pattern) if matches else [pattern]
    if not result:
        raise UserError(f"{key}: {no_match(pattern)}")
    return [stat_file(path, key) for path in result]


def stat_file(path: str, key: str) -> FileStat:
    """Return the FileStat of a local file.

    Args:
        path: Path of the file.
        key: Config key for error messages.

    Raises:
        UserError: If there is no such file, or it is not a regular file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"{key}: no such file: {path}; {nearest_path(path)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{key}: {path} is a folder or a device, a file is expected")
    return FileStat(path, status.st_size, str(status.st_mtime_ns))


def _find_remote(pattern: str, key: str) -> list[FileStat]:
    result: list[FileStat] = []
    for address in expand_braces(pattern):
        try:
            files = addresses.find(address, pattern=is_pattern(address))
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        except Exception as error:  # each file system raises its own errors
            reason = reason_of(error)
            raise UserError(f"{key}: {address} cannot be read: {reason}") from error
        if not files:
            raise UserError(f"{key}: no file matches {address}")
        result += [FileStat(*file) for file in files]
    return result
