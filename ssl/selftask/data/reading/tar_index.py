"""Index of the images in tar files: made once, saved in the cache folder, memory-mapped."""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from selftask.data.reading import index as store
from selftask.data.reading.class_numbers import NO_LABEL, number_labels
from selftask.data.reading.index import Index
from selftask.data.reading.path_table import arrays_of_paths
from selftask.data.reading.progress_log import log_progress
from selftask.data.reading.skipped_files import EXTENSIONS, kind_of
from selftask.data.reading.storage import FileStat, open_file
from selftask.data.reading.tar_walk import Damaged, Member, walk
from selftask.distributed.heartbeat import track
from selftask.errors import UserError, nearest
from selftask.logs.stages import staged

THREADS = 8  # threads that read headers
VERSION = 4  # version of the file format; files of other versions are ignored
MAX_LABEL = 1 << 20  # bytes of a member with a label; larger members are ignored
IMAGE_NAMES = (*(name.removeprefix(".") for name in EXTENSIONS), "npy")


@dataclass(frozen=True)
class Wanted:
    """Extensions of the members to read from each sample: image and label."""

    image: str | None  # None: the first image
    label: str | None  # an extension such as `cls`, or `json.FIELD`; None: no labels


@dataclass
class _Shard:
    """The content of one tar file."""

    members: list[Member] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # extensions of members, and fields of json members
    damaged: int | None = None  # byte from which the file is unreadable
    passed_over: Counter[str] = field(default_factory=Counter)


def index_shards(shards: list[FileStat], wanted: Wanted) -> Index:
    """Return the index of the images in these shards; make it if it is missing or out of date.

    The paths of the index are the names of the members that contain images. Its other arrays
    locate these members: ``shard`` (N,) int32, an index into ``shards``, and ``start`` and ``size``
    (N,) int64 in bytes. ``header["damaged"]`` has a pair for each damaged shard: its index, and the
    byte from which it is unreadable.

    Raises:
        UserError: If a shard cannot be read, there are no images, or the requested labels are
            missing. Labels with the default extension ``cls`` may be missing.
    """
    described = json.dumps([VERSION, wanted.image, wanted.label, [shard.path for shard in shards]])
    file = store.index_file("tar", shards[0].path, described)
    state: list[list[Any]] = [[shard.size, shard.stamp] for shard in shards]
    return store.cached(file, lambda: state, lambda: _build(shards, wanted), always=True)


def _build(shards: list[FileStat], wanted: Wanted) -> Index:
    log_progress(f"reading the headers of {len(shards)} tar files")
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        reads = pool.map(lambda shard: _read_shard(shard, wanted), shards)
        counted = staged("index", reads, len(shards))
        parts = list(track("reading the headers of tar files", counted))
    _check_found(shards, parts, wanted)
    counts = [len(part.members) for part in parts]
    members = [member for part in parts for member in part.members]
    texts = [label for part in parts for label in part.labels]
    labels, classes = number_labels(texts)
    arrays = {
        **arrays_of_paths([os.fsencode(member.name) for member in members]),
        "shard": np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        "start": np.array([member.offset for member in members], dtype=np.int64),
        "size": np.array([member.size for member in members], dtype=np.int64),
    }
    if (labels != NO_LABEL).any():
        arrays["labels"] = labels
    passed_over = sum((part.passed_over for part in parts), Counter[str]())
    header = {
        "num_folders": 0,
        "damaged": [(n, part.damaged) for n, part in enumerate(parts) if part.damaged is not None],
        "passed_over": [(0, *item) for item in passed_over.items()],
        "classes": classes,
    }
    return Index(header, arrays)


def _read_shard(shard: FileStat, wanted: Wanted) -> _Shard:
    content = _Shard()
    sample, image, label = "", None, None

    def finish() -> None:
        if image is not None:
            content.members.append(image)
            content.labels.append(label)

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
                    label = _read_label(file, member, wanted.label, content.seen)
                elif kind := kind_of(member.name):
                    content.passed_over[kind] += 1
                content.seen.add(extension)
    except Damaged as damage:
        content.damaged = damage.offset
    except OSError as error:
        raise UserError(f"data: {shard.path} cannot be read: {error}") from error
    finish()
    return content


def split_name(name: str) -> tuple[str, str]:
    """Split a name into key and extension like WebDataset: ``a/b.left.PNG`` -> a/b, left.png."""
    folder, slash, file = name.rpartition("/")
    key, _, extension = file.partition(".")
    return f"{folder}{slash}{key}", extension.lower()


def _is_image(extension: str, wanted: Wanted) -> bool:
    return extension == wanted.image if wanted.image else extension in IMAGE_NAMES


def _read_label(file: BinaryIO, member: Member, wanted: str, seen: set[str]) -> str | None:
    """Return the label in a member: its text, or a field of its JSON.

    None if the member is larger than MAX_LABEL or is not valid JSON, or if the field is missing.
    """
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
        seen.update(f"json.{key}" for key in value)
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
        names = [name for name in seen if name not in IMAGE_NAMES]
        raise UserError(
            f"data.labels: no sample has a label {wanted.label!r}; {nearest(wanted.label, names)}"
        )
