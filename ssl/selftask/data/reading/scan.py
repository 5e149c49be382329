"""Listing of all images below a folder, with many threads and in a fixed order.

Folders are sorted by path, and files by name within a folder. Bytes are compared, so the order does
not depend on the locale. If the folder was scanned before, only folders with a changed modification
time are read again.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from selftask.data.reading import index as store
from selftask.data.reading.class_numbers import label_top_folders
from selftask.data.reading.index import Index, settled
from selftask.data.reading.path_table import join_bytes, split_bytes
from selftask.data.reading.progress_log import ScanProgress
from selftask.data.reading.skipped_files import kind_of
from selftask.distributed.heartbeat import track
from selftask.errors import UserError
from selftask.logs.stages import stage

THREADS = 16  # for network file systems, which answer in parallel
_REAL, _LINK, _ALIAS = 0, 1, 2  # how a folder is reached; an alias is listed by its other path


@dataclass(frozen=True, slots=True)
class Folder:
    """Content of one folder, without hidden names."""

    path: bytes  # relative to the root, which is b""
    mtime_ns: int
    kind: int
    names: bytes = b""  # of the images, sorted, each followed by b"/"
    count: int = 0
    folders: tuple[bytes, ...] = ()  # paths of its subfolders
    links: tuple[bytes, ...] = ()  # paths of links to folders
    passed_over: tuple[tuple[str, int], ...] = ()  # extension, number of files
    ident: tuple[int, int] = field(default=(0, 0))  # device and inode


def scan_folder(root: str, extensions: Sequence[str]) -> Index:
    """Return the images below ``root``, from its index if that is up to date.

    Links to folders are followed, but each folder is listed once. Hidden files and folders are
    skipped. Top folders are the labels if there are at least two with images.

    Args:
        root: Top folder.
        extensions: Extensions of image files, in lower case, such as ``.jpg``.

    Raises:
        UserError: If a folder cannot be read. Otherwise its images would be missing unnoticed.
    """
    file = store.index_file("folder", root, *extensions)
    earlier = store.load(file)
    if earlier is not None and _is_current(root, earlier):
        return earlier
    endings = tuple(os.fsencode(ending) for ending in extensions)
    with ExitStack() as stack:
        listed: list[Folder] = []
        alone, total = None, 0
        for level in walk(root, endings, _rows(earlier)):
            listed += level
            total += sum(folder.count for folder in level)
            if alone is None and total >= store.MIN_INDEXED:
                alone = stack.enter_context(store.only_one(file))
                theirs = None if alone else store.load(file)
                if theirs is not None and _is_current(root, theirs):
                    return theirs
        index = _assemble(listed)
        return index if total < store.MIN_INDEXED else store.save(index, file)


def walk(
    root: str, endings: tuple[bytes, ...], earlier: Mapping[bytes, Folder] | None = None
) -> Iterator[list[Folder]]:
    """Yield lists of folders: real ones level by level, then those behind symbolic links.

    Within a list, folders are sorted by path. A folder that is reached by several paths is listed
    under the first one; its other paths are yielded as aliases, without content.

    Args:
        root: Top folder.
        endings: Endings of image files, in lower case.
        earlier: Folders of an earlier scan by path; unchanged ones are not read again.

    Raises:
        UserError: If a folder cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    frontier: list[tuple[bytes, int]] = [(b"", _REAL)]
    links: list[bytes] = []
    with stage("scan") as line, ThreadPoolExecutor(THREADS) as pool:
        reader = _FolderReader(ScanProgress(root, line), os.fsencode(root), endings, earlier or {})
        while frontier or links:
            if not frontier:
                frontier, links = [(path, _LINK) for path in sorted(links)], []
            size = max(1, len(frontier) // (8 * THREADS))
            parts = [frontier[first : first + size] for first in range(0, len(frontier), size)]
            contents = track("looking for images", pool.map(reader.map_images, parts))
            level: list[Folder] = []
            inside: list[bytes] = []
            for folder in chain.from_iterable(contents):
                if folder.ident in seen:
                    level.append(Folder(folder.path, folder.mtime_ns, _ALIAS))
                    continue
                seen.add(folder.ident)
                level.append(folder)
                inside += folder.folders
                links += folder.links
            frontier = [(path, _REAL) for path in sorted(inside)]
            yield level


@dataclass(frozen=True)
class _FolderReader:
    """Reader of folders, shared by several threads."""

    progress: ScanProgress
    root: bytes
    endings: tuple[bytes, ...]
    earlier: Mapping[bytes, Folder]

    def map_images(self, paths: list[tuple[bytes, int]]) -> list[Folder]:
        """Return the content of these folders, without those that no longer exist."""
        contents = (self._list_folder(path, kind) for path, kind in paths)
        return [folder for folder in contents if folder is not None]

    def _list_folder(self, path: bytes, kind: int) -> Folder | None:
        where = os.path.join(self.root, path)
        try:
            started = time.time_ns()
            status = os.stat(where)
            ident = (status.st_dev, status.st_ino)
            earlier = self.earlier.get(path)
            if (
                earlier is not None
                and earlier.kind != _ALIAS
                and earlier.mtime_ns == status.st_mtime_ns
            ):
                return replace(earlier, kind=kind, ident=ident)
            mtime_ns = settled(status.st_mtime_ns, started)
            return self._read(where, Folder(path, mtime_ns, kind, ident=ident))
        except (FileNotFoundError, NotADirectoryError):
            return None  # removed after its name was read
        except OSError as error:
            shown = os.fsdecode(where)
            raise UserError(f"data: cannot look into {shown}: {error.strerror}") from error

    def _read(self, where: bytes, folder: Folder) -> Folder:
        """List a folder without opening its files."""
        start = folder.path + b"/" if folder.path else b""
        names: list[bytes] = []
        folders: list[bytes] = []
        links: list[bytes] = []
        passed_over: Counter[str] = Counter()
        with os.scandir(where) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    continue
                if _is_folder(entry):
                    (links if entry.is_symlink() else folders).append(start + entry.name)
                elif entry.name.lower().endswith(self.endings):
                    names.append(entry.name)
                    if len(names) % 10_000 == 0:
                        self.progress.add(10_000)
                elif kind := kind_of(os.fsdecode(entry.name)):
                    passed_over[kind] += 1
        self.progress.add(len(names) % 10_000, folders=1)
        return replace(
            folder,
            names=join_bytes(sorted(names), b"/"),
            count=len(names),
            folders=tuple(folders),
            links=tuple(links),
            passed_over=tuple(passed_over.items()),
        )


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _assemble(listed: list[Folder]) -> Index:
    """Build the index of these folders, which may be in any order."""
    listed = sorted(listed, key=lambda folder: folder.path)
    counts = np.array([folder.count for folder in listed], dtype=np.int64)
    names = np.frombuffer(b"".join(folder.names for folder in listed), dtype=np.uint8)
    folders = join_bytes([folder.path for folder in listed], b"\0")
    arrays = {
        "names": names,
        "offsets": split_bytes(names, b"/"),
        "firsts": np.cumsum(counts) - counts,
        "folders": np.frombuffer(folders, dtype=np.uint8),
        "mtimes": np.array([folder.mtime_ns for folder in listed], dtype=np.int64),
        "kinds": np.array([folder.kind for folder in listed], dtype=np.int8),
    }
    arrays["folder_offsets"] = split_bytes(arrays["folders"], b"\0")
    paths = [os.fsdecode(os.path.join(folder.path, b"")) for folder in listed if folder.count]
    labels = label_top_folders(paths)
    if labels is not None:
        arrays["labels"] = np.repeat(labels, counts[counts > 0])
    passed_over = [(row, *item) for row, folder in enumerate(listed) for item in folder.passed_over]
    header = {"num_folders": int((counts > 0).sum()), "passed_over": passed_over}
    return Index(header, arrays)


def _is_current(root: str, index: Index) -> bool:
    """Return whether no folder of the index has changed since the scan."""
    paths = [os.path.join(os.fsencode(root), path) for path in _folder_paths(index)]
    mtimes = index.arrays["mtimes"].tolist()
    parts = [paths[first::THREADS] for first in range(THREADS)]
    times = [mtimes[first::THREADS] for first in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        return all(pool.map(_have_times, parts, times))


def _have_times(paths: list[bytes], mtimes: list[int]) -> bool:
    try:
        return all(os.stat(p).st_mtime_ns == mtime for p, mtime in zip(paths, mtimes, strict=True))
    except OSError:
        return False


def _folder_paths(index: Index) -> list[bytes]:
    return index.arrays["folders"].tobytes().split(b"\0")[:-1]


def _rows(index: Index | None) -> dict[bytes, Folder]:
    """Return the folders of an index by path, for the argument ``earlier`` of ``walk``."""
    if index is None:
        return {}
    paths = _folder_paths(index)
    inside: dict[bytes, tuple[list[bytes], list[bytes]]] = {path: ([], []) for path in paths}
    kinds, arrays = index.arrays["kinds"].tolist(), index.arrays
    for path, kind in zip(paths, kinds, strict=True):
        if path:
            inside[path.rpartition(b"/")[0]][kind != _REAL].append(path)
    bounds = np.append(arrays["firsts"], len(index))
    starts = arrays["offsets"][bounds].tolist()
    passed_over: dict[int, list[tuple[str, int]]] = {}
    for row, kind, number in index.header["passed_over"]:
        passed_over.setdefault(row, []).append((kind, number))
    return {
        path: Folder(
            path,
            int(arrays["mtimes"][row]),
            kinds[row],
            names=arrays["names"][starts[row] : starts[row + 1]].tobytes(),
            count=int(bounds[row + 1] - bounds[row]),
            folders=tuple(inside[path][0]),
            links=tuple(inside[path][1]),
            passed_over=tuple(passed_over.get(row, ())),
        )
        for row, path in enumerate(paths)
    }
