"""Images in an LMDB database."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from selftask.config.fields import setting
from selftask.data.reading.class_numbers import number_labels
from selftask.data.reading.files import now_reading
from selftask.data.reading.image import decode, image_of
from selftask.data.reading.path_table import PathTable
from selftask.data.source import Source
from selftask.errors import BadImage, UserError, explained, nearest_path, require
from selftask.files.paths import is_file, is_folder
from selftask.registry import register_source

_LABEL = ".cls"  # suffix of the key of a label, as in WebDataset's shards
_OPEN: dict[str, Any] = {}  # path -> LMDB environment; a process must not open a file twice


@register_source("lmdb")
class Lmdb(Source):
    """Images of an LMDB, sorted by key: encoded, .npy, or raw pixels of a given shape."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Folder with data.mdb, or the path of this file."""
        shape: list[int] | None = setting(None, min=1)
        """Shape [H, W, C] of raw uint8 pixels; null: images are encoded, or .npy arrays."""
        labels: bool = True
        """Whether to use the entry ``KEY.cls`` as the label of the image ``KEY`` or ``KEY.jpg``,
        with any extension."""

    def __init__(self, config: Config) -> None:
        require("lmdb", "data", "LMDB files")
        self.file, self.shape = os.path.expanduser(config.path), config.shape
        self._real = os.path.realpath(self.file)
        labels: dict[bytes, bytes] = {}
        keys = list(_image_keys(_open(self._real), self.file, labels))
        if not keys:
            raise UserError(f"data: no images in {self.file}")
        self.keys = PathTable.of(os.fsdecode(key) for key in keys)
        if config.labels and labels:
            values = (labels.get(os.path.splitext(key)[0]) for key in keys)
            texts = [None if text is None else os.fsdecode(text).strip() for text in values]
            self.labels, self._classes = number_labels(texts)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        name, data, label = self.path(index), self.stored_bytes(index), self.label_of(index)
        if self.shape is None:
            return decode(data, name), label
        if len(data) != np.prod(self.shape):
            raise BadImage(name, f"{len(data)} bytes are not pixels of shape {self.shape}")
        return image_of(np.frombuffer(data, np.uint8).reshape(self.shape), name), label

    def stored_bytes(self, index: int) -> bytes:
        name = self.path(index)
        now_reading(name)
        with _open(self._real).begin() as transaction:
            data: bytes | None = transaction.get(os.fsencode(self.keys[index]))
        if data is None:
            raise BadImage(name, "the key is gone")
        return data

    def path(self, index: int) -> str:
        """Return a name such as ``train_lmdb:KEY``."""
        return f"{self.file}:{self.keys[index]}"

    def describe(self) -> str:
        """Return a line such as ``126227 images, no labels``."""
        return f"{len(self)} images, {self.describe_labels()}"

    def files(self) -> list[str]:
        """Return the file that ``data.stage_to`` can copy."""
        return [f"{self._real}/data.mdb" if os.path.isdir(self._real) else self._real]

    def use_copies(self, copy_of: Callable[[str], str]) -> None:
        """Read from the copy of the file, ``copy_of(path)``, from now on."""
        self._real = os.path.realpath(copy_of(self._real))


def _open(path: str) -> Any:
    """Return the LMDB environment of a resolved path, shared by all sources in this process."""
    if path not in _OPEN:
        _OPEN[path] = _open_new(path)
    return _OPEN[path]


def _close_inherited() -> None:
    """Close environments inherited by a fork, which can be neither used nor reopened."""
    for environment in _OPEN.values():
        environment.close()
    _OPEN.clear()


os.register_at_fork(after_in_child=_close_inherited)


def _open_new(path: str) -> Any:
    import lmdb

    if not (is_file(path) or is_folder(path)):
        raise UserError(f"data.path: no such LMDB: {path}; {nearest_path(path)}")
    with explained(f"data.path: {path} is not an LMDB"):
        opened = lmdb.open(
            path,
            subdir=os.path.isdir(path),
            readonly=True,
            lock=False,  # read-only, maybe on a read-only disk
            readahead=False,  # reads are in random order
            meminit=False,
        )
        _check_length(opened, path)
    return opened


def _check_length(opened: Any, path: str) -> None:
    """Raise UserError if the file is truncated; reading past its end would kill the process."""
    file = f"{path}/data.mdb" if os.path.isdir(path) else path
    there = os.path.getsize(file)
    needed = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
    if there < needed:
        opened.close()
        raise UserError(f"data.path: {file} is cut off: {there} of {needed} bytes are there")


def _image_keys(opened: Any, path: str, labels: dict[bytes, bytes]) -> Iterator[bytes]:
    """Yield the keys of images, sorted by bytes; add keys and values of labels to ``labels``.

    Entries such as ``__len__`` are metadata, often pickled, and are not read.
    """
    suffix = _LABEL.encode()
    with (
        explained(f"data.path: {path} cannot be read"),
        opened.begin() as transaction,
        transaction.cursor() as cursor,
    ):
        for key in cursor.iternext(keys=True, values=False):
            if key.endswith(suffix):
                labels[key.removesuffix(suffix)] = cursor.value()
            elif not key.startswith(b"__"):
                yield bytes(key)
