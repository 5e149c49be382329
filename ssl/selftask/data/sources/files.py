"""Image files: a folder tree, or a text list of paths."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from selftask.data.reading.class_numbers import label_top_folders, name_top_folders
from selftask.data.reading.files import read_bytes, read_sample
from selftask.data.reading.image import check_header, decode_image
from selftask.data.reading.index import Index
from selftask.data.reading.path_list import read_list
from selftask.data.reading.path_table import PathTable
from selftask.data.reading.scan import scan_folder
from selftask.data.reading.skipped_files import ARCHIVES, EXTENSIONS, describe, kind_of
from selftask.data.source import Source
from selftask.errors import BadImage, UserError, nearest_path, plural
from selftask.files import addresses
from selftask.files.addresses import fetch, is_remote
from selftask.files.paths import exists, expand_user, is_file, is_folder
from selftask.registry import register_source

MAX_HEADERS = 5_000  # larger sets are not checked at the start, as that takes seconds
HIDDEN = re.compile(r"(^|/)\.")  # a file or folder whose name begins with a dot


class FileSource(Source):
    """Base class of sources whose images are files; relative paths are relative to ``root``."""

    root: str
    paths: PathTable  # relative to root, or absolute
    num_folders: int
    _passed_over: dict[str, int] | None = None
    _unreadable: dict[int, BadImage] | None = None  # None: not checked yet
    _copy_of: Callable[[str], str] | None = None  # None: there are no copies

    def _take_index(self, index: Index) -> None:
        self.paths, self.num_folders = index.paths, index.header["num_folders"]
        self.labels, self._classes = index.labels, index.header.get("classes")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.cut(index, self.image(self.path(index))), self.label_of(index)

    def image(self, path: str) -> np.ndarray:
        """Read a whole file as uint8 (H, W, C), its copy if there is one; raises BadImage."""
        if self._copy_of is not None:
            with suppress(BadImage):  # not copied, or removed since
                return self.decode(read_bytes(self._copy_of(path)), path)
        return self.decode(read_bytes(path), path)

    def use_copies(self, copy_of: Callable[[str], str]) -> None:
        """Read ``copy_of(path)`` instead of each file from now on, if the copy is readable."""
        self._copy_of = copy_of

    def decode(self, data: bytes, path: str) -> np.ndarray:
        """Decode the content of the file at ``path`` to uint8 (H, W, C); raises BadImage."""
        return decode_image(data, path)

    def path(self, index: int) -> str:
        return self.path_of_row(index)

    def path_of_row(self, row: int) -> str:
        """Return the full path or address of entry ``row`` of ``paths``."""
        return self.full_path(self.paths[row])

    def full_path(self, path: str) -> str:
        """Return a path relative to ``root`` as a full one; an address is returned unchanged."""
        return path if is_remote(path) else os.path.join(self.root, path)

    def stored_bytes(self, index: int) -> bytes | None:
        return read_sample(self.path(index))

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        self.paths.hash_names(add)

    def describe(self) -> str:
        """Return a line such as ``1108 images, 20 folders, 0 unreadable``.

        Files are unreadable if their header cannot be read. Other damage is found when a file is
        decoded. If headers are not checked (see ``unreadable``), the line says so.
        """
        images, folders = plural("image", len(self)), plural("folder", self.num_folders)
        text = f"{len(self)} {images}, {self.num_folders} {folders}"
        checked = self._checks_headers
        text += f", {len(self.unreadable())} unreadable" if checked else ", headers not checked"
        others = self.passed_over()
        return f"{text}; {describe(others)}" if others else text

    @property
    def _checks_headers(self) -> bool:
        return len(self) <= MAX_HEADERS and not is_remote(self.path(0))

    def unreadable(self) -> dict[int, BadImage]:
        """Return an error for each file whose header cannot be read, by index; it is cached.

        Remote files are not checked, and no file if there are more than MAX_HEADERS.
        """
        if self._unreadable is None:
            rows = range(len(self) if self._checks_headers else 0)
            with ThreadPoolExecutor(max_workers=8) as pool:
                checks = pool.map(check_header, map(self.path, rows))
                self._unreadable = {row: bad for row, bad in enumerate(checks) if bad is not None}
        return self._unreadable

    def passed_over(self) -> dict[str, int]:
        return self._passed_over or {}


class LabeledByFolder(FileSource):
    """Base class of sources whose classes are the top folders below ``root``.

    There are no labels if there are fewer than two such folders.
    """

    def _take_names(self, names: list[str], *, labels: bool) -> None:
        self.paths = PathTable.of(names)
        self.num_folders = len({os.path.dirname(name) for name in names})
        self.labels = label_top_folders(names) if labels else None

    def class_names(self) -> list[str] | None:
        return super().class_names() or name_top_folders(self.paths, self.labels)


ARRAYS = (".npy", ".npz")  # read by the source ``bands``


@register_source("folder")
class Folder(LabeledByFolder):
    """Folder tree of images; top folders are used as labels if there are several."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Folder of images, which is searched at any depth; may be remote."""
        labels: bool = True
        """Whether top folders are used as labels, if there are several."""

    def __init__(self, config: Config) -> None:
        self.root = os.path.expanduser(config.path)
        if is_remote(self.root):
            self._list_address(labels=config.labels)
            return
        if not is_folder(self.root):
            raise UserError(f"data: {_missing(self.root, 'folder')}")
        index = scan_folder(self.root, EXTENSIONS)
        self._passed_over = index.passed_over
        if not len(index):
            others = f"; {describe(self._passed_over)}" if self._passed_over else ""
            if len(scan_folder(self.root, ARRAYS)):
                others += "; data.name=bands reads the .npy and .npz files there"
            raise UserError(
                f"data: no images (looked for {' '.join(EXTENSIONS)}) under {config.path}{others}"
            )
        self._take_index(index)
        self.labels = index.labels if config.labels else None

    def _list_address(self, *, labels: bool) -> None:
        below = addresses.walk(self.root)
        names = [n for n in below if n.lower().endswith(EXTENSIONS) and not HIDDEN.search(n)]
        if not names:
            extensions = " ".join(EXTENSIONS)
            raise UserError(f"data: no images (looked for {extensions}) under {self.root}")
        self._take_names(names, labels=labels)


@register_source("list")
class ListFile(FileSource):
    """Text file with one image path per line, relative to the file; a label may follow a tab."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Path of the text file; may be remote."""

    def __init__(self, config: Config) -> None:
        file = fetch(config.path)
        if not is_file(file):
            raise UserError(f"data: {_missing(str(file), 'list of images')}")
        index = read_list(str(file))
        if not len(index):
            raise UserError(f"data: no images: {file} is empty (one path a line is expected)")
        self.root = folder_of(config.path)
        self._take_index(index)
        if not is_there(self.path(0)):
            line = index.header["first_line"]
            raise UserError(f"data: {file}:{line}: no such image: {self.path(0)}")


def folder_of(path: str) -> str:
    """Return the folder of a file given by the user, as a path or an address."""
    return path.rpartition("/")[0] if is_remote(path) else str(expand_user(path).parent)


def is_there(path: str) -> bool:
    """Return whether a local or remote image exists."""
    return addresses.exists(path) if is_remote(path) else exists(path)


def _missing(path: str, kind: str) -> str:
    """Return a message such as ``no such folder: a/trian; did you mean 'a/train'?``."""
    if not path:
        return f"no {kind} is given"
    if kind_of(path) in ARCHIVES and exists(path):
        return f"{path} is an archive: unpack it and name the folder (a plain .tar can be read)"
    if exists(path):
        return f"{path} is not a {kind}"
    return f"no such {kind}: {path}; {nearest_path(path)}"
