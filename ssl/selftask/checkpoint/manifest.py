"""Checkpoint files with a manifest of length and checksum, written atomically."""

from __future__ import annotations

import errno
import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from selftask.checkpoint.restricted_pickle import check_file, check_nesting
from selftask.files.received import UnreadableFile, check_regular, read_json

CHECKSUM = "xxh3_128"  # key in a manifest; five times as fast as zlib's CRC-32
_BLOCK = 1 << 20  # bytes; stays in the cache
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)  # fsync is not supported
_SMALL_WRITES = 1 << 16  # bytes that are collected; larger blocks are written directly


class DamagedCheckpoint(Exception):
    """Raised if a checkpoint is incomplete, damaged or not a checkpoint."""


class NoCheckpoint(DamagedCheckpoint):
    """Raised if a file is intact but is not a selftask checkpoint."""


def write_checked(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write a state to a file and fsync it; return the manifest entry of the file."""
    with path.open("wb", buffering=_SMALL_WRITES) as file:
        writer = _Checked(file)
        try:
            torch.save(state, writer)  # type: ignore[arg-type]  # torch.save only writes
        except RuntimeError:
            if writer.error is not None:  # torch hides it behind its own error
                raise writer.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": writer.length, CHECKSUM: writer.checksum.hexdigest()}


def verify_zip(archive: Path | IO[bytes]) -> None:
    """Raise DamagedCheckpoint if a CRC in a zip file is wrong, which torch.load does not check."""
    try:
        with zipfile.ZipFile(archive) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error) as error:
        raise DamagedCheckpoint(str(error)) from error
    if damaged is not None:
        raise DamagedCheckpoint(f"checksum of {damaged} differs")


def read_file(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read the state in a file, onto the CPU; raise DamagedCheckpoint if that fails.

    Args:
        path: The checkpoint file.
        mmap: Map tensors into memory instead of reading them.
    """
    try:
        check_regular(path)
        check_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        check_nesting(state)
    except Exception as error:  # for a damaged zip, torch raises five kinds
        reason = str(error).partition("\n")[0]
        raise DamagedCheckpoint(f"{type(error).__name__}: {reason}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint("holds no state dict")
    return state


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a manifest; empty if it is missing or no JSON.

    Raises:
        DamagedCheckpoint: If it is not a regular file or too large.
    """
    try:
        return read_json(path)
    except UnreadableFile as error:
        raise DamagedCheckpoint(f"{path.name} is not a manifest") from error


def verify(path: Path, manifest: Any, *, content: bool = True) -> None:
    """Compare a file with its manifest.

    Args:
        path: The file.
        manifest: Dict with its expected length ``bytes`` and checksum ``xxh3_128``.
        content: Compare the checksum in addition to the length.

    Raises:
        DamagedCheckpoint: If they differ, or the manifest lacks a value.
    """
    try:
        length, expected = manifest["bytes"], manifest[CHECKSUM]
    except (KeyError, TypeError) as error:
        raise DamagedCheckpoint("its manifest lacks the length or the checksum") from error
    size = path.stat().st_size
    if size != length:
        raise DamagedCheckpoint(f"{size} of {length} bytes")
    if content and checksum(path) != expected:
        raise DamagedCheckpoint("checksum differs")


def checksum(path: Path) -> str:
    """Return the 128-bit XXH3 of a file as hexadecimal digits."""
    hasher, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            hasher.update(block[:length])
    return hasher.hexdigest()


class _Checked(io.RawIOBase):
    """Writable file that counts bytes and computes their XXH3."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.length, self.checksum = file, 0, xxhash.xxh3_128()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        self.checksum.update(block)
        self.length += len(block)
        try:
            return self.file.write(block)
        except OSError as error:
            self.error = error
            raise


def sync(path: Path) -> None:
    """Fsync a file, or a folder if its file system supports that.

    Some network and FUSE file systems sync files but no folders.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC or not path.is_dir():
            raise
    finally:
        os.close(handle)
