"""Image files: a tree of folders, or a text list of paths."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from selftask.data.labels import name_top_folders
from selftask.data.reading.files import BadImage
from selftask.data.reading.image import check_header, read_image
from selftask.data.reading.path_list import read_list
from selftask.data.reading.scan import scan_folder
from selftask.data.reading.skipped_files import ARCHIVES, describe, kind_of
from selftask.data.source import PathTable, Source
from selftask.errors import UserError, nearest_path, plural
from selftask.files.paths import exists, expand_user, is_file, is_folder
from selftask.registry import register_source

EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".jp2", ".avif"),
)
MAX_HEADERS = 5_000  # of larger sets they are not checked at the start: it would take seconds


class FileSource(Source):
    """Images in files below ``root``: the part that folder and list share."""

    root: str
    paths: PathTable  # relative to root, or absolute
    num_folders: int
    _passed_over: dict[str, int] | None = None
    _unreadable: dict[int, BadImage] | None = None  # None: nobody has looked yet

    def __len__(self) -> int:
        return len(self.paths)

    def __getstate__(self) -> dict[str, Any]:
        """Labels from an index file are left out: whoever gets this maps them, as the paths."""
        state = dict(self.__dict__)
        if self.labels is not None and self.labels is getattr(self.paths, "labels", None):
            del state["labels"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "labels" not in state:
            self.labels = getattr(self.paths, "labels", None)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return read_image(self.path(index), self.max_pixels), self.label_of(index)

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.paths[index])

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        self.paths.hash_names(add)

    def describe(self) -> str:
        """``1108 images, 20 folders, 0 unreadable``.

        Unreadable are files whose header cannot be read; damage further on shows when the file is
        decoded, and is listed then. Above MAX_HEADERS files the line says that nobody looked.
        """
        images, folders = plural("image", len(self)), plural("folder", self.num_folders)
        found = f"{len(self)} {images}, {self.num_folders} {folders}"
        checked = len(self) <= MAX_HEADERS
        found += f", {len(self.unreadable())} unreadable" if checked else ", headers not checked"
        others = self.passed_over()
        return f"{found}; {describe(others)}" if others else found

    def unreadable(self) -> dict[int, BadImage]:
        """Files whose header cannot be read; looked for once, and not above MAX_HEADERS files."""
        if self._unreadable is None:
            rows = range(len(self) if len(self) <= MAX_HEADERS else 0)
            with ThreadPoolExecutor(max_workers=8) as pool:
                checks = pool.map(lambda row: check_header(self.path(row), self.max_pixels), rows)
                self._unreadable = {row: bad for row, bad in enumerate(checks) if bad is not None}
        return self._unreadable

    def passed_over(self) -> dict[str, int]:
        return self._passed_over or {}


@register_source("folder")
class Folder(FileSource):
    """Any tree of images; the top folders are the labels if there are several."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        labels: bool = True  # False: no labels, whatever the folders are called

    def __init__(self, config: Config) -> None:
        self.root = os.path.expanduser(config.path)
        if not is_folder(self.root):
            raise UserError(f"data: {_missing(self.root, 'folder')}")
        found = scan_folder(self.root, EXTENSIONS)
        self._passed_over = found.passed_over
        if not len(found):
            others = f"; {describe(self._passed_over)}" if self._passed_over else ""
            raise UserError(
                f"data: no images (looked for {' '.join(EXTENSIONS)}) under {config.path}{others}"
            )
        self.paths = found.paths
        self.num_folders = found.num_folders
        self.labels = found.labels if config.labels else None

    def class_names(self) -> list[str] | None:
        """The top folders."""
        return name_top_folders(self.paths, self.labels)


@register_source("list")
class ListFile(FileSource):
    """A text file with one image path a line, relative to the file; a label after a tab."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str

    def __init__(self, config: Config) -> None:
        file = expand_user(config.path)
        if not is_file(file):
            raise UserError(f"data: {_missing(str(file), 'list of images')}")
        found = read_list(str(file))
        if not len(found):
            raise UserError(f"data: no images: {file} is empty (one path a line is expected)")
        self.root = str(file.parent)
        self.paths = found.paths
        self.num_folders = found.num_folders
        self.labels = found.labels
        self._classes = found.header.get("classes")
        if not exists(self.path(0)):
            line = found.header["first_line"]
            raise UserError(f"data: {file}:{line}: no such image: {self.path(0)}")

    def class_names(self) -> list[str] | None:
        """The labels, where they are texts."""
        return self._classes


def _missing(path: str, what: str) -> str:
    """``no such folder: a/trian; did you mean 'a/train'?``."""
    if kind_of(path) in ARCHIVES and exists(path):
        return f"{path} is an archive: unpack it and name the folder (a plain .tar can be read)"
    if exists(path):
        return f"{path} is not a {what}"
    return f"no such {what}: {path}; {nearest_path(path)}"
