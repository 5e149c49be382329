"""WebDataset's tar files with random access, so that runs can resume as with image files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from selftask.data.reading.image import decode
from selftask.data.reading.progress_log import log_progress
from selftask.data.reading.skipped_files import describe
from selftask.data.reading.storage import find_files, read_part
from selftask.data.reading.tar_index import Wanted, index_shards
from selftask.data.source import Source
from selftask.errors import UserError
from selftask.files.addresses import is_remote
from selftask.registry import register_source


@register_source("webdataset")
class WebDataset(Source):
    """Tar shards, local or at an fsspec address; their headers are read once to make an index."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str | list[str]
        """A tar file, a folder of tar files, or a pattern such as ``train-{000..146}.tar`` or
        ``s3://b/*.tar``; also a list of these."""
        images: str | None = None
        """Extension of the member that holds a sample's image; null: the first image."""
        labels: str | None = "cls"
        """Extension of the member that holds a sample's label, or ``json.FIELD``; ``cls`` may be
        missing. Null: no labels."""

    def __init__(self, config: Config) -> None:
        patterns = [config.path] if isinstance(config.path, str) else config.path
        if not patterns:
            raise UserError("data.path: a list of tar files is empty")
        patterns = [f"{p}/*.tar" if os.path.isdir(os.path.expanduser(p)) else p for p in patterns]
        shards = find_files(patterns, "data.path")
        wanted = Wanted(_extension(config.images), _label(config.labels))
        self.shards = [shard.path for shard in shards]
        self._read_from = self.shards
        self.index = index_shards(shards, wanted)
        self.names, self.labels = self.index.paths, self.index.labels
        self._classes = self.index.header["classes"]
        self._shard, self._start, self._size = (
            self.index.arrays[name] for name in ("shard", "start", "size")
        )
        self._damaged = self.index.header["damaged"]
        if self._damaged:
            log_progress(self._describe_damage())

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        data = self._bytes(self._read_from, index)
        return decode(data, self.path(index)), self.label_of(index)

    def stored_bytes(self, index: int) -> bytes | None:
        is_stored_here = not is_remote(self.shards[self._shard[index]])
        return self._bytes(self.shards, index) if is_stored_here else None

    def _bytes(self, shards: list[str], index: int) -> bytes:
        start, size = int(self._start[index]), int(self._size[index])
        return read_part(shards[self._shard[index]], start, size, self.path(index))

    def path(self, index: int) -> str:
        """Return a name such as ``train-003.tar:n01440764/10026.jpg``."""
        return f"{self.shards[self._shard[index]]}:{self.names[index]}"

    def describe(self) -> str:
        """Return a line such as ``50000 images in 12 tar files, 10 classes``."""
        damage = f"; {self._describe_damage()}" if self._damaged else ""
        text = f"{len(self)} images in {len(self.shards)} tar files"
        others = f"; {describe(self.passed_over())}" if self.passed_over() else ""
        return f"{text}, {self.describe_labels()}{others}{damage}"

    def passed_over(self) -> dict[str, int]:
        return self.index.passed_over

    def files(self) -> list[str]:
        """Return the tar files, which ``data.stage_to`` can copy."""
        return self.shards

    def use_copies(self, copy_of: Callable[[str], str]) -> None:
        """Read from the copy of each file, ``copy_of(path)``, from now on."""
        self._read_from = [copy_of(path) for path in self.shards]

    def _describe_damage(self) -> str:
        shard, byte = self._damaged[0]
        return (
            f"{len(self._damaged)} tar files cannot be read to their end, the first "
            f"{self.shards[shard]} from byte {byte} on"
        )


def _extension(images: str | None) -> str | None:
    return None if images is None else images.removeprefix(".").lower()


def _label(labels: str | None) -> str | None:
    """Parse ``cls``, another extension, ``json.FIELD`` (also ``json[FIELD]``), or None.

    Raises UserError for ``json`` without a field.
    """
    if labels is None:
        return None
    wanted = labels.removeprefix(".").removesuffix("]").replace("[", ".")
    if wanted == "json":
        raise UserError("data.labels=json: which field of it? data.labels=json.FIELD")
    return wanted
