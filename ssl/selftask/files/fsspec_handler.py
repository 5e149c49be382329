"""fsspec's file systems (``s3://``, ``gs://``, ``hf://``, ``https://``) as a handler of iopath."""

from __future__ import annotations

import errno
import zlib
from typing import IO, Any, cast

from iopath.common.file_io import PathHandler

from selftask.errors import AddressError, nearest
from selftask.files.cache_dir import cache_folder, locked

_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")

_COMMON = ("abfs", "az", "ftp", "gcs", "gs", "hdfs", "hf", "http", "https", "s3", "sftp", "webdav")
"""Schemes suggested in error messages; fsspec knows more, most of them wrappers of others."""


class FsspecHandler(PathHandler):
    """iopath handler of the addresses of one scheme.

    Args:
        prefix: The scheme with ``://``.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    @classmethod
    def of(cls, address: str) -> FsspecHandler:
        """Return the handler for the scheme of an address; raise AddressError as ``store_of``."""
        store_of(address)
        return cls(address.partition("://")[0] + "://")

    def find(self, path: str, pattern: bool) -> list[tuple[str, int, str]]:
        """Return address, size in bytes and stamp of each file, sorted; see ``addresses.find``.

        Args:
            path: Address of a file, or a pattern.
            pattern: Whether ``path`` is a pattern.
        """
        store, inside = store_of(path)
        infos = store.glob(inside, detail=True) if pattern else {inside: store.info(inside)}
        return [
            (store.unstrip_protocol(infos[name]["name"]), *_stat(infos[name]))
            for name in sorted(infos)
            if infos[name]["type"] == "file"
        ]

    def read_range(self, path: str, offset: int, size: int) -> bytes:
        """Read a part of a file, in one request.

        Args:
            path: Address of the file.
            offset: Position of the first byte.
            size: Maximum number of bytes; fewer are returned at the end of the file.
        """
        return cast(bytes, _ask(path, "cat_file", start=offset, end=offset + size))

    def _get_supported_prefixes(self) -> list[str]:
        return [self._prefix]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        """Return the cached copy of this version (size and stamp); download it if there is none.

        With ``force`` it is downloaded again.
        """
        store, inside = store_of(path)
        version = f"{path} {_stat(store.info(inside))}"
        folder = cache_folder() / "files" / f"{zlib.crc32(version.encode()):08x}"
        local = folder / path.rstrip("/").rpartition("/")[2]
        with locked(folder / ".lock"):
            if force or not local.exists():
                part = local.with_name(f".{local.name}.part")
                store.get_file(inside, str(part))
                part.replace(local)
        return str(local)

    def _copy_from_local(
        self, local_path: str, dst_path: str, overwrite: bool = False, **kwargs: Any
    ) -> None:
        store, inside = store_of(dst_path)
        if not overwrite and store.exists(inside):
            raise FileExistsError(errno.EEXIST, "there is such a file", dst_path)
        store.put_file(local_path, inside)

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        return cast(IO[Any], _ask(path, "open", mode))

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return bool(_ask(path, "exists"))

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return bool(_ask(path, "isfile"))

    def _isdir(self, path: str, **kwargs: Any) -> bool:
        return bool(_ask(path, "isdir"))

    def _ls(self, path: str, **kwargs: Any) -> list[str]:
        listed = _ask(path, "ls", detail=False)
        return sorted(name.rstrip("/").rpartition("/")[2] for name in listed)

    def _mkdirs(self, path: str, **kwargs: Any) -> None:
        _ask(path, "makedirs", exist_ok=True)

    def _rm(self, path: str, **kwargs: Any) -> None:
        _ask(path, "rm_file")


def store_of(address: str) -> tuple[Any, str]:
    """Return this process's fsspec file system for an address, and the path in it.

    Raises AddressError if fsspec does not know the scheme, or needs a package for it.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import available_protocols

    try:
        store, inside = url_to_fs(address)
    except (ImportError, ValueError) as error:
        scheme = address.partition("://")[0]
        hint = "" if scheme in available_protocols() else f"; {nearest(scheme, _COMMON)}"
        raise AddressError(f"{address}: {error}{hint}") from error
    return store, inside


def _ask(address: str, method: str, *args: Any, **options: Any) -> Any:
    """Call a method of the file system of an address with the path in it."""
    store, inside = store_of(address)
    return getattr(store, method)(inside, *args, **options)


def _stat(info: dict[str, Any]) -> tuple[int, str]:
    """Return size in bytes (-1 if unknown) and ETag or time of change (empty if unknown)."""
    stamp = next((info[key] for key in _STAMPS if info.get(key) is not None), "")
    size = info.get("size")
    return -1 if size is None else int(size), str(stamp)
