"""Image files: a tree of folders, or a text list of paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selftask.data.image import check_header, read_image
from selftask.data.source import NO_LABEL, PathTable, Source
from selftask.errors import UserError, nearest
from selftask.registry import register_source

EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".jp2", ".avif"),
)
MAX_HEADERS = (
    5_000  # the headers of larger sets are not checked at the start: it would take seconds
)


class FileSource(Source):
    """Images in files below ``root``: the part that folder and list share."""

    root: str
    paths: PathTable  # relative to root, or absolute
    num_folders: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        label = NO_LABEL if self.labels is None else int(self.labels[index])
        return read_image(self.path(index), self.max_pixels), label

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.paths[index])

    def describe(self) -> str:
        """``1108 images, 20 folders, 0 unreadable``.

        Unreadable are files whose header cannot be read; damage further on shows when the file is
        decoded, and is listed then. Above MAX_HEADERS files the line says that nobody looked.
        """
        found = f"{_count(len(self), 'image')}, {_count(self.num_folders, 'folder')}"
        if len(self) > MAX_HEADERS:
            return f"{found}, headers not checked"
        return f"{found}, {self.count_unreadable()} unreadable"

    def count_unreadable(self) -> int:
        """Number of files whose header cannot be read."""
        with ThreadPoolExecutor(max_workers=8) as pool:
            paths = map(self.path, range(len(self)))
            checks = pool.map(lambda path: check_header(path, self.max_pixels), paths)
            return sum(bad is not None for bad in checks)


@register_source("folder")
class Folder(FileSource):
    """Any tree of images; the top folders are the labels if there are several."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        labels: bool = True  # False: no labels, whatever the folders are called

    def __init__(self, config: Config) -> None:
        self.root = os.path.expanduser(config.path)
        if not os.path.isdir(self.root):
            raise UserError(f"data: {_missing(self.root, 'folder')}")
        found = sorted(_walk(self.root))
        if not found:
            raise UserError(
                f"data: no images (looked for {' '.join(EXTENSIONS)}) under {config.path}"
            )
        self.paths = PathTable(found)
        self.num_folders = len({os.path.dirname(path) for path in found})
        self.labels = _top_folder_labels(found) if config.labels else None


@register_source("list")
class ListFile(FileSource):
    """A text file with one image path a line, relative to the file; a label after a tab."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str

    def __init__(self, config: Config) -> None:
        file = Path(config.path).expanduser()
        if not file.is_file():
            raise UserError(f"data: {_missing(str(file), 'list of images')}")
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        entries = [(number, line.rstrip()) for number, line in enumerate(lines, 1) if line.strip()]
        if not entries:
            raise UserError(f"data: no images: {file} is empty (one path a line is expected)")
        columns = [line.partition("\t") for _, line in entries]
        self.root = str(file.parent)
        self.paths = PathTable(path for path, _, _ in columns)
        self.num_folders = len({os.path.dirname(path) for path, _, _ in columns})
        if not os.path.exists(self.path(0)):
            raise UserError(f"data: {file}:{entries[0][0]}: no such image: {self.path(0)}")
        labelled = [bool(tab) for _, tab, _ in columns]
        if any(labelled) and not all(labelled):
            number = entries[labelled.index(not labelled[0])][0]
            raise UserError(
                f"data: {file}:{number}: some lines have a label after a tab, others not"
            )
        if all(labelled):
            self.labels = _label_numbers([label.strip() for _, _, label in columns])


def _walk(root: str) -> Iterator[str]:
    """Paths of images below ``root``, relative to it, in no order.

    Links to folders are followed, each folder once; names that begin with a dot are not seen.
    """
    visited = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        status = os.stat(os.path.join(root, folder))
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(path)
                elif entry.name.lower().endswith(EXTENSIONS):
                    yield path


def _top_folder_labels(paths: list[str]) -> np.ndarray | None:
    """Number of each path's top folder, in sorted order; None unless there are at least two."""
    tops = [path.partition("/")[0] if "/" in path else None for path in paths]
    numbers = {top: number for number, top in enumerate(sorted({t for t in tops if t is not None}))}
    if len(numbers) < 2:
        return None
    return np.array([NO_LABEL if t is None else numbers[t] for t in tops], dtype=np.int64)


def _label_numbers(labels: list[str]) -> np.ndarray:
    """Labels as they are if all are non-negative integers, else numbered in sorted order."""
    if all(label.isdecimal() for label in labels):
        return np.array([int(label) for label in labels], dtype=np.int64)
    numbers = {label: number for number, label in enumerate(sorted(set(labels)))}
    return np.array([numbers[label] for label in labels], dtype=np.int64)


def _missing(path: str, what: str) -> str:
    """``no such folder: a/trian; did you mean 'a/train'?``, from the nearest folder that exists."""
    missing = Path(path)
    if missing.exists():
        return f"{path} is not a {what}"
    while not missing.parent.is_dir():
        missing = missing.parent
    siblings = [str(missing.parent / name) for name in os.listdir(missing.parent)]
    return f"no such {what}: {path}; {nearest(str(missing), siblings, show=6)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
