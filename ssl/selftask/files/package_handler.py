"""Files of installed packages: ``package://NAME/weights/resnet50.pt``."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import IO, Any

from iopath.common.file_io import PathHandler

from selftask.errors import UserError

PREFIX = "package://"


class PackageHandler(PathHandler):  # type: ignore[misc]  # iopath's class is untyped
    """iopath handler that reads files of an installed package without importing it."""

    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    def _open(self, path: str, mode: str = "r", **_: Any) -> IO[Any]:
        return local_path(path).open(mode)

    def _exists(self, path: str, **_: Any) -> bool:
        return local_path(path).exists()

    def _isfile(self, path: str, **_: Any) -> bool:
        return local_path(path).is_file()

    def _isdir(self, path: str, **_: Any) -> bool:
        return local_path(path).is_dir()

    def _ls(self, path: str, **_: Any) -> list[str]:
        return os.listdir(local_path(path))

    def _get_local_path(self, path: str, **_: Any) -> str:
        return str(local_path(path))

    def _mkdirs(self, path: str, **_: Any) -> None:
        raise OSError("packages are read-only")


def local_path(address: str) -> Path:
    """Return the path of a file of a package, which may not exist.

    Raises UserError if no such package is installed. A module without a folder is no package.
    """
    name, _, inside = address.removeprefix(PREFIX).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        raise UserError(f"{address}: no package {name!r} is installed")
    paths = [Path(folder, inside) for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])
