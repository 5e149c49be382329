"""Files at addresses such as ``s3://bucket/x``, through iopath's PathManager.

An address is handled by the PathHandler that is registered for its prefix with iopath's global
PathManager. A plug-in (``import: [mine]``) registers its own handler::

    from iopath.common.file_io import PathManagerFactory
    PathManagerFactory.get().register_handler(MyHandler())

``package://NAME/path`` is a file of an installed package. Other addresses without a handler go to
fsspec. A handler needs ``_open``, ``_exists``, ``_isfile``, ``_isdir``, ``_ls``, ``_mkdirs``,
``_rm``, ``_copy_from_local`` and ``_get_local_path``. Operations that an object store lacks are not
used: no rename, append, lock or fsync.

iopath is imported at the first address, so local paths do not need it.
"""

from __future__ import annotations

import errno
import io
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from selftask.errors import AddressError, UserError, explained, reason_of
from selftask.files.cache_dir import cache_path
from selftask.files.paths import expand_user
from selftask.files.replace import replacing

if TYPE_CHECKING:
    from iopath.common.file_io import PathManager

PIECE = 4 << 20  # bytes copied at a time


def is_remote(path: str | Path) -> bool:
    """Return True for an address (``scheme://...``), False for a local path."""
    return "://" in (path if isinstance(path, str) else str(path))


def manager(address: str) -> PathManager:
    """Return iopath's global PathManager, with a handler for this address and without telemetry.

    Raises UserError if neither iopath nor fsspec knows the scheme, or a package for it is missing.
    """
    from iopath.common.file_io import PathManagerFactory

    path_manager = PathManagerFactory.get()
    path_manager.set_logging(False)
    if not any(address.startswith(prefix) for prefix in path_manager._path_handlers):
        from selftask.files.fsspec_handler import FsspecHandler
        from selftask.files.package_handler import PREFIX, PackageHandler

        is_package = address.startswith(PREFIX)
        path_manager.register_handler(PackageHandler() if is_package else FsspecHandler.of(address))
    return path_manager


def exists(address: str) -> bool:
    """Return True if a file or folder exists. Raises UserError if this cannot be determined."""
    return _ask(address, "exists")


def is_file(address: str) -> bool:
    """Return True for an existing file. Raises UserError if this cannot be determined."""
    return _ask(address, "isfile")


def is_folder(address: str) -> bool:
    """Return True for an existing folder. Raises UserError if this cannot be determined."""
    return _ask(address, "isdir")


def list_names(address: str) -> list[str]:
    """Return the sorted names in a folder; an empty list if there is no such folder.

    Raises UserError if the folder cannot be listed.
    """
    if not is_folder(address):
        return []
    return sorted({name.rstrip("/").rpartition("/")[2] for name in _ask(address, "ls")})


def walk(address: str) -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to it, sorted in each folder.

    Yields nothing if there is no such folder. Raises UserError if a folder cannot be listed.
    """
    for name in list_names(address):
        inside = f"{address.rstrip('/')}/{name}"
        if is_folder(inside):
            yield from (f"{name}/{below}" for below in walk(inside))
        else:
            yield name


def open_read(address: str) -> BinaryIO:
    """Open a file for reading and seeking. Errors of the handler are not converted."""
    return cast(BinaryIO, manager(address).open(address, "rb"))


def read_bytes(address: str) -> bytes:
    """Read a whole file. Errors of the handler are not converted."""
    with open_read(address) as file:
        return file.read()


def read_range(address: str, offset: int, size: int) -> bytes:
    """Read a part of a file. Errors of the handler are not converted.

    Args:
        address: Address of the file.
        offset: Position of the first byte.
        size: Maximum number of bytes; fewer are returned at the end of the file.
    """
    handler = _fsspec_handler(address)
    if handler is not None:  # one request, without reading ahead
        return handler.read_range(address, offset, size)
    with open_read(address) as file:
        file.seek(offset)
        return file.read(size)


def find(address: str, *, pattern: bool = False) -> list[tuple[str, int, str]]:
    """Return the files at an address.

    Errors of the handler are not converted, such as FileNotFoundError for a missing file.

    Args:
        address: Address of a file, or a pattern.
        pattern: Whether ``address`` is a pattern with ``*``, ``?``, ``[...]`` or ``**/``.

    Returns:
        Address, size in bytes (-1 if unknown) and stamp of each file. The stamp is a text that
        changes with the content. If it is unknown, as with handlers other than fsspec's, it is
        empty, and replacing a file by another one of the same size is not noticed.
    """
    handler = _fsspec_handler(address)
    if handler is not None:
        return handler.find(address, pattern)
    matches = _match(address) if pattern else [address]
    return [(match, _size(match), "") for match in matches]


def download(address: str, path: Path) -> None:
    """Copy a file from the store to ``path``, atomically.

    Errors of the handler are not converted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, open_read(address) as source, part.open("wb") as copy:
        shutil.copyfileobj(source, copy, PIECE)


def upload(path: Path, address: str) -> None:
    """Copy a local file to the store; an existing file is replaced, a missing folder created.

    Errors of the handler are not converted.
    """
    store = manager(address)
    store.mkdirs(address.rpartition("/")[0])
    store.copy_from_local(str(path), address, overwrite=True)


def remove(address: str) -> None:
    """Remove a file from the store. Errors of the handler are not converted."""
    manager(address).rm(address)


def fetch(path: str | Path) -> Path:
    """Return a local path of a file given by a user; a file at an address is downloaded.

    The handler decides how long the copy is kept. In a local path only ``~`` is replaced; it may
    not exist. Raises UserError for an address that cannot be read.
    """
    if not is_remote(path):
        return expand_user(path)
    return Path(_ask(str(path), "get_local_path"))


@contextmanager
def output_folder(out: str | Path) -> Iterator[Path]:
    """Context manager that yields a local folder to write to, and uploads it if ``out`` is remote.

    For a local ``out`` that path is yielded, with ``~`` replaced, and not created. For an address,
    the files of a temporary folder are uploaded at exit, in the order in which they were written;
    after an error nothing is uploaded. Raises UserError if the upload fails.
    """
    if not is_remote(out):
        yield expand_user(out)
        return
    with tempfile.TemporaryDirectory(prefix="selftask-") as name:
        folder = Path(name)
        yield folder
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
            address = f"{str(out).rstrip('/')}/{path.relative_to(folder).as_posix()}"
            with explained(f"{address}: cannot be written"):
                upload(path, address)


def work_folder(out: str) -> Path:
    """Return the local folder of a run: ``out``, or a folder in the cache if it is an address."""
    if not is_remote(out):
        return Path(out)
    address = out.rstrip("/")
    name = f"{address.rpartition('/')[2]}-{zlib.crc32(address.encode()):08x}"
    return cache_path() / "out" / name


def _ask(address: str, question: str) -> Any:
    try:
        return getattr(manager(address), question)(address)
    except UserError:
        raise
    except Exception as error:  # handlers raise various errors
        raise AddressError(f"{address}: cannot be read ({reason_of(error)})") from error


def _match(pattern: str) -> list[str]:
    """Return the addresses of files that match ``*``, ``?``, ``[...]`` and ``**/``."""
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    parts = re.split(r"(\*\*/|\*|\?|\[[^\]]*\])", pattern[len(fixed) + 1 :])
    wild = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    regex = re.compile(
        "".join(wild.get(p, p.replace("[!", "[^") if p[:1] == "[" else re.escape(p)) for p in parts)
    )
    return [f"{fixed}/{name}" for name in walk(fixed) if regex.fullmatch(name)]


def _size(address: str) -> int:
    if not manager(address).isfile(address):
        raise FileNotFoundError(errno.ENOENT, "no such file", address)
    with open_read(address) as file:
        return file.seek(0, io.SEEK_END)


def _fsspec_handler(address: str) -> Any:
    """Return the handler of an address if it is fsspec's, else None."""
    from selftask.files.fsspec_handler import FsspecHandler

    handlers = manager(address)._path_handlers
    handler = next(handlers[prefix] for prefix in handlers if address.startswith(prefix))
    return handler if isinstance(handler, FsspecHandler) else None
