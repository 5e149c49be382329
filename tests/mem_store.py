"""An object store for tests, as a plug-in: ``import: [mem_store]`` and addresses ``mem://...``.

Objects are files in ``$MEM_STORE`` whose names are quoted addresses. As in an object store there
are no folders, no rename, no append, no lock and no fsync. Unlike in most, an upload is not atomic:
what a kill leaves is the first part of an object.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import IO, Any

from iopath.common.file_io import PathHandler, PathManagerFactory

PREFIX = "mem://"


class MemStore(PathHandler):
    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    @property
    def _folder(self) -> Path:
        return Path(os.environ["MEM_STORE"])

    def _object(self, path: str) -> Path:
        return self._folder / urllib.parse.quote(path.removeprefix(PREFIX), safe="")

    def _keys(self, path: str) -> list[str]:
        prefix = path.removeprefix(PREFIX).rstrip("/") + "/"
        names = (urllib.parse.unquote(name) for name in os.listdir(self._folder))
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        assert mode in ("r", "rb"), "objects are uploaded whole"
        data = self._object(path).read_bytes()
        return io.BytesIO(data) if mode == "rb" else io.StringIO(data.decode())

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return self._isfile(path) or self._isdir(path)

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return self._object(path).is_file()

    def _isdir(self, path: str, **kwargs: Any) -> bool:
        return bool(self._keys(path))

    def _ls(self, path: str, **kwargs: Any) -> list[str]:
        return sorted({key.partition("/")[0] for key in self._keys(path)})

    def _mkdirs(self, path: str, **kwargs: Any) -> None:
        pass

    def _rm(self, path: str, **kwargs: Any) -> None:
        self._object(path).unlink()

    def _copy_from_local(
        self, local_path: str, dst_path: str, overwrite: bool = False, **kwargs: Any
    ) -> None:
        assert overwrite or not self._isfile(dst_path)
        with self._object(dst_path).open("wb", buffering=0) as file:
            data = Path(local_path).read_bytes()
            file.write(data[: len(data) // 2])
            time.sleep(float(os.environ.get("MEM_STORE_DELAY_S", 0)))
            file.write(data[len(data) // 2 :])

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        local = Path(tempfile.mkdtemp(dir=os.environ["MEM_STORE"], prefix=".")) / Path(path).name
        local.write_bytes(self._object(path).read_bytes())
        return str(local)


if PREFIX not in PathManagerFactory.get()._path_handlers:
    PathManagerFactory.get().register_handler(MemStore())
