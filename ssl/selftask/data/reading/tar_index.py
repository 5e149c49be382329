"""Index of the images in tar files: made once, saved in the cache folder, memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from selftask.data.reading.class_numbers import number_labels
from selftask.data.reading.progress_log import say
from selftask.data.reading.skipped_files import EXTENSIONS, kind_of
from selftask.data.reading.storage import FileStat, open_file
from selftask.data.reading.tar_walk import Damaged, Member, walk
from selftask.distributed.heartbeat import track
from selftask.errors import UserError, nearest
from selftask.files.cache_dir import cache_folder, locked
from selftask.logs.stages import staged

THREADS = 8  # that read headers at the same time
VERSION = 2  # of the file format; other versions are ignored
MAX_LABEL = 1 << 20  # bytes of a member with a label; larger members are ignored
IMAGE_NAMES = (*(name.removeprefix(".") for name in EXTENSIONS), "npy")
_ARRAYS = ("shards", "offsets", "sizes", "labels", "name_ends", "names")


@dataclass(frozen=True)
class Wanted:
    """Which members of a sample to read: the extensions of its image and its label."""

    image: str | None  # None: the first image
    label: str | None  # an extension such as `cls`, or `json.FIELD`; None: no labels


@dataclass
class TarIndex:
    """Index with one row per image, in the order of the shards; arrays are memory-mapped."""

    shards: np.ndarray  # (N,) int32
    offsets: np.ndarray  # (N,) int64, bytes
    sizes: np.ndarray  # (N,) int64, bytes
    labels: np.ndarray  # (N,) int64, -1: none
    name_ends: np.ndarray  # (N,) int64, end of each name in ``names``
    names: np.ndarray  # uint8, all names of members, concatenated
    damaged: list[tuple[int, int]]  # number of a shard, and byte from which it is unreadable
    passed_over: dict[str, int]  # image-like members that are not read, by extension

    def __len__(self) -> int:
        return len(self.offsets)

    def name(self, index: int) -> str:
        """Return the name of the image's member."""
        start = int(self.name_ends[index - 1]) if index else 0
        return os.fsdecode(self.names[start : int(self.name_ends[index])].tobytes())


@dataclass
class _Shard:
    """The content of one tar file."""

    members: list[Member] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # extensions of members, and fields of json members
    damaged: int | None = None
    passed_over: Counter[str] = field(default_factory=Counter)


def open_index(shards: list[FileStat], wanted: Wanted) -> Path:
    """Return the folder of the index of these shards; make the index if it is missing.

    The index depends on their paths, sizes and stamps: if one changes, a new index is made.

    Raises:
        UserError: The shards have no images, or none of the requested labels.
    """
    described = [VERSION, wanted.image, wanted.label, [tuple(shard) for shard in shards]]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]
    folder = cache_folder() / "tar" / digest
    if not (folder / "index.json").exists():
        with locked(folder.with_suffix(".lock")):
            if not (folder / "index.json").exists():
                _write(folder, _build(shards, wanted))
    return folder


def map_index(folder: Path) -> TarIndex:
    """Memory-map the index in a folder; processes share the memory."""
    mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    arrays = {name: array.view(np.ndarray) for name, array in mapped.items()}  # faster to index
    more = json.loads((folder / "index.json").read_text())
    damaged = [tuple(where) for where in more["damaged"]]
    return TarIndex(**arrays, damaged=damaged, passed_over=more["passed_over"])


def _build(shards: list[FileStat], wanted: Wanted) -> TarIndex:
    say(f"reading the headers of {len(shards)} tar files")
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        reads = pool.map(lambda shard: _read_shard(shard, wanted), shards)
        counted = staged("index", reads, len(shards))
        parts = list(track("reading the headers of tar files", counted))
    _check_found(shards, parts, wanted)
    counts = [len(part.members) for part in parts]
    members = [member for part in parts for member in part.members]
    names = [os.fsencode(member.name) for member in members]
    return TarIndex(
        shards=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        offsets=np.array([member.offset for member in members], dtype=np.int64),
        sizes=np.array([member.size for member in members], dtype=np.int64),
        labels=number_labels([label for part in parts for label in part.labels]),
        name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        names=np.frombuffer(b"".join(names), dtype=np.uint8),
        damaged=[(n, part.damaged) for n, part in enumerate(parts) if part.damaged is not None],
        passed_over=dict(sum((part.passed_over for part in parts), Counter[str]())),
    )


def _read_shard(shard: FileStat, wanted: Wanted) -> _Shard:
    found = _Shard()
    sample, image, label = "", None, None

    def finish() -> None:
        if image is not None:
            found.members.append(image)
            found.labels.append(label)

    try:
        with open_file(shard.path) as file:
            for member in walk(file, shard.path):
                key, extension = split_name(member.name)
                if key.endswith("/") or not key:
                    continue  # a hidden file, as macOS adds
                if key != sample:
                    finish()
                    sample, image, label = key, None, None
                if image is None and _is_image(extension, wanted):
                    image = member
                elif wanted.label is not None and extension == wanted.label.partition(".")[0]:
                    label = _read_label(file, member, wanted.label, found.seen)
                elif kind := kind_of(member.name):
                    found.passed_over[kind] += 1
                found.seen.add(extension)
    except Damaged as damage:
        found.damaged = damage.offset
    except OSError as error:
        raise UserError(f"data: {shard.path} cannot be read: {error}") from error
    finish()
    return found


def split_name(name: str) -> tuple[str, str]:
    """Split a name into key and extension like WebDataset: ``a/b.left.PNG`` -> a/b, left.png."""
    folder, slash, file = name.rpartition("/")
    key, _, extension = file.partition(".")
    return f"{folder}{slash}{key}", extension.lower()


def _is_image(extension: str, wanted: Wanted) -> bool:
    return extension == wanted.image if wanted.image else extension in IMAGE_NAMES


def _read_label(file: BinaryIO, member: Member, wanted: str, seen: set[str]) -> str | None:
    """Return the label in a member, its text or a field of its json; None if it has none."""
    if member.size > MAX_LABEL:
        return None
    file.seek(member.offset)
    text = file.read(member.size)
    _, dot, path = wanted.partition(".")
    if not dot:
        return text.decode("utf-8", "replace").strip()
    try:
        value: Any = json.loads(text)
    except ValueError:  # also raised for text that is not UTF-8
        return None
    for name in path.split("."):
        if not isinstance(value, dict):
            return None
        seen.update(f"json.{known}" for known in value)
        value = value.get(name)
    return None if value is None or isinstance(value, dict | list) else str(value)


def _check_found(shards: list[FileStat], parts: list[_Shard], wanted: Wanted) -> None:
    """Raise UserError if there are no images, or no labels of the requested kind."""
    seen = set().union(*(part.seen for part in parts))
    there = ", ".join(sorted(f".{name}" for name in seen if not name.startswith("json.")))
    if not any(part.members for part in parts):
        looked_for = f".{wanted.image}" if wanted.image else " ".join(EXTENSIONS)
        raise UserError(
            f"data: no images in {len(shards)} tar files, the first {shards[0].path}: looked for "
            f"{looked_for}; there are {there or 'no members'}"
        )
    if wanted.label in (None, "cls"):  # cls is the default and may be missing
        return
    if not any(label is not None for part in parts for label in part.labels):
        known = [name for name in seen if name not in IMAGE_NAMES]
        raise UserError(
            f"data.labels: no sample has a label {wanted.label!r}; {nearest(wanted.label, known)}"
        )


def _write(folder: Path, index: TarIndex) -> None:
    """Write all files atomically, as other processes may read them at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        for name in _ARRAYS:
            np.save(made / f"{name}.npy", getattr(index, name))
        more = {"damaged": index.damaged, "passed_over": index.passed_over}
        (made / "index.json").write_text(json.dumps(more))
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
