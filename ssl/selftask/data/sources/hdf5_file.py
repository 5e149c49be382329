"""Images in one HDF5 file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from selftask.config.fields import setting
from selftask.data.reading.class_numbers import number_labels, refuse_misspelled
from selftask.data.reading.files import now_reading
from selftask.data.reading.guards import check_memory
from selftask.data.reading.handles import PerProcess
from selftask.data.reading.image import decode, image_of
from selftask.data.reading.storage import find_files
from selftask.data.source import Source
from selftask.data.sources.arrays import check_shape, label_numbers
from selftask.errors import BadImage, UserError, explained, nearest, require
from selftask.files.addresses import fetch
from selftask.registry import register_source

_LABELS = "labels"  # default key, which may be missing
_LEAVE_OUT = "data.labels=null leaves them out"


@register_source("hdf5")
class Hdf5(Source):
    """Images of one HDF5 file: an array (N, H, W[, C]) or (N, C, H, W), or N encoded images."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Path of the HDF5 file; may be remote."""
        images: str = "images"
        """Key of the data set of images, such as ``group/name``."""
        labels: str | None = "labels"
        """Key of the labels; the default key may be missing. Texts are numbered in sorted
        order. Null: no labels."""
        labels_path: str | None = None
        """Path of the HDF5 file with the labels; may be remote. Null: the file of the images."""
        channels: int = setting(3, min=1)
        """Number of channels of each image."""

    def __init__(self, config: Config) -> None:
        require("h5py", "data", "HDF5 files")
        (file,) = find_files([str(fetch(config.path))], "data.path")
        self.file, self.key = file.path, config.images
        self.channels = config.channels
        damaged = f"data: {self.file} is damaged"
        with explained(damaged), _open(self.file) as opened:
            images = _dataset(opened, self.key, self.file, "images")
            self.shape = tuple(images.shape)
            self.encoded = _is_bytes(images)
            self.item_bytes = images.dtype.itemsize  # 8, a pointer, if lengths vary
            self._check_shape()
        if config.labels is not None:
            self._read_labels(config.labels, config)
        self._opened = PerProcess(partial(_open_images, self.file, self.key))

    def _check_shape(self) -> None:
        wanted = (1,) if self.encoded else (3, 4)
        if len(self.shape) not in wanted or self.shape[0] == 0:
            raise UserError(
                f"data.images: {self.key!r} of {self.file} has shape {self.shape}; (N, H, W), "
                "(N, H, W, C), (N, C, H, W), or (N,) encoded images are expected"
            )
        if self.channels != 3 and not self.encoded:
            check_shape(self.shape[1:], self.channels, self.file)

    def _read_labels(self, key: str, config: Config) -> None:
        (file,) = find_files([str(fetch(config.labels_path or config.path))], "data.labels_path")
        name = f"{key!r} of {file.path}"
        with explained(f"data.labels: {file.path}"), _open(file.path) as opened:
            if key == _LABELS and config.labels_path is None and key not in opened:
                others = [name for name in opened if name != config.images]
                refuse_misspelled(key, others, "data.labels", file.path)
                return
            values = _dataset(opened, key, file.path, "labels")
            if values.size != self.shape[0]:
                raise UserError(
                    f"data.labels: {self.shape[0]} images but labels of shape {values.shape}"
                )
            size = values.size * max(values.dtype.itemsize, 8)
            check_memory(size, f"data.labels: {name}", _LEAVE_OUT)
            texts = values.dtype.kind in "OS"
            values = values.asstr(errors="surrogateescape")[:] if texts else values[:]
        flat = values.reshape(-1)
        numbered = number_labels(flat.tolist()) if texts else label_numbers(flat, name)
        self.labels, self._classes = numbered

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        name, item = self.path(index), self._item(index)
        if self.encoded:
            data = _as_bytes(item).ljust(self.item_bytes, b"\0")  # NumPy drops zeros at the end
            return decode(data, name), self.label_of(index)
        return image_of(item, name, self.channels), self.label_of(index)

    def _item(self, index: int) -> Any:
        name = self.path(index)
        now_reading(name)
        try:
            return self._opened()[index]
        except MemoryError:
            raise
        except Exception as error:  # such as a damaged chunk or a truncated file
            raise BadImage(name, str(error)) from error

    def stored_bytes(self, index: int) -> bytes:
        return _as_bytes(self._item(index))

    def path(self, index: int) -> str:
        """Return a name such as ``pcam.h5:images[17]``."""
        return f"{self.file}:{self.key}[{index}]"

    def describe(self) -> str:
        """Return a line such as ``50000 images of 32x32x3, 10 classes``."""
        shape = "" if self.encoded else " of " + "x".join(map(str, self.shape[1:]))
        return f"{len(self)} images{shape}, {self.describe_labels()}"

    def files(self) -> list[str]:
        """Return the file of the images, which ``data.stage_to`` can copy."""
        return [self.file]

    def use_copies(self, copy_of: Callable[[str], str]) -> None:
        """Read from the copy of the file, ``copy_of(path)``, from now on."""
        self._opened = PerProcess(partial(_open_images, copy_of(self.file), self.key))


def _open(path: str) -> Any:
    import h5py

    with explained(f"data: {path} is not an HDF5 file", OSError):
        return h5py.File(path, "r")


def _open_images(path: str, key: str) -> Any:
    """Open a data set and keep its file open; opening takes longer than reading an image."""
    return _dataset(_open(path), key, path, "images")


def _dataset(file: Any, key: str, path: str, field: str) -> Any:
    import h5py

    dataset = file.get(key)
    if not isinstance(dataset, h5py.Dataset):
        hint = nearest(key, _keys(file))
        raise UserError(f"data.{field}: {path} has no data set {key!r}; {hint}")
    _check_files(dataset, Path(path), f"data.{field}: {key!r} of {path}")
    return dataset


def _check_files(dataset: Any, path: Path, name: str) -> None:
    """Raise UserError if a data set has external storage or uses files outside its folder.

    Otherwise an HDF5 file from an untrusted source could expose any file of this machine as pixels.
    """
    if dataset.external:
        file = os.fsdecode(dataset.external[0][0])
        raise UserError(f"{name} is stored in another file, {file}; such data sets are not read")
    linked = {dataset.file.filename} - {str(path)}
    if dataset.is_virtual:
        linked |= {source.file_name for source in dataset.virtual_sources()} - {"."}
    folder = path.resolve().parent
    for file in sorted(linked):
        inside = (folder / file).resolve()
        if not inside.is_relative_to(folder) or not inside.is_file():
            raise UserError(f"{name} uses {file}, which is not a file in its folder")


def _keys(file: Any) -> Iterator[str]:
    import h5py

    keys: list[str] = []

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            keys.append(name)

    file.visititems(add)
    yield from keys


def _is_bytes(images: Any) -> bool:
    """Return whether items are encoded images: bytes of variable or fixed length."""
    import h5py

    vlen = h5py.check_vlen_dtype(images.dtype)
    return vlen == np.uint8 or vlen is bytes or images.dtype.kind in "SV"


def _as_bytes(item: Any) -> bytes:
    return item if isinstance(item, bytes) else item.tobytes()
