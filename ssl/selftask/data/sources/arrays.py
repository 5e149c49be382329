"""Images in one NumPy file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from selftask.config.fields import setting
from selftask.data.reading.class_numbers import number_labels, refuse_misspelled
from selftask.data.reading.guards import check_memory
from selftask.data.reading.image import from_array
from selftask.data.source import ExtraKind, Source
from selftask.errors import UserError, check_known, explained
from selftask.files.addresses import fetch
from selftask.files.paths import is_file
from selftask.registry import register_source

_LABELS = "labels"  # default key, which may be missing


@register_source("array")
class ArrayFile(Source):
    """Images of a .npz or .npy file: (N, H, W), (N, H, W, C) or (N, C, H, W) of any number type."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Path of the .npz or .npy file; may be remote."""
        images: str = "images"
        """Key of the images in a .npz file."""
        labels: str | None = "labels"
        """Key of the labels in a .npz file; the default key may be missing. Texts are numbered in
        sorted order. Null: no labels."""
        channels: int = setting(3, min=1)
        """Number of channels of each image."""
        extras: list[str] = field(default_factory=list)
        """Keys of a .npz file with extra data of each image: texts, numbers, or images, which are
        8-bit arrays (N, H, W, channels)."""

    def __init__(self, config: Config) -> None:
        self.file = str(fetch(config.path))
        self.images, labels, self._extras = _load(self.file, config)
        self.channels = config.channels
        if self.images.ndim not in (3, 4) or len(self.images) == 0:
            raise UserError(
                f"data: {self.file}: images have shape {self.images.shape}; "
                "(N, H, W), (N, H, W, C) or (N, C, H, W) is expected"
            )
        check_shape(self.images.shape[1:], self.channels, self.file)
        if labels is not None and labels.shape != (len(self.images),):
            raise UserError(
                f"data: {self.file}: {len(self.images)} images but labels of shape {labels.shape}"
            )
        self.extras = {name: self._kind(name) for name in self._extras}
        if labels is not None:
            self.labels, self._classes = label_numbers(labels, self.file)

    def _kind(self, name: str) -> ExtraKind:
        """Return the kind of an extra array; raises UserError if its length or dtype is wrong."""
        array = self._extras[name]
        if len(array) != len(self.images) or array.dtype.kind not in "Ubuif":
            raise UserError(
                f"data.extras: {name!r} of {self.file} is {array.dtype} of shape {array.shape}; "
                f"texts, numbers or images are expected for each of {len(self.images)} images"
            )
        if array.dtype.kind == "U":
            return "text"
        image = array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == self.channels
        return "image" if image else "array"

    def extra(self, index: int, name: str) -> Any:
        entry = self._extras[name][index]
        return str(entry) if self.extras[name] == "text" else entry

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return from_array(self.images[index], self.channels), self.label_of(index)

    def stored_bytes(self, index: int) -> bytes | None:
        return self.images[index].tobytes()

    def path(self, index: int) -> str:
        return f"{self.file}[{index}]"

    def describe(self) -> str:
        """Return a line such as ``50000 images of 32x32x3, 10 classes``."""
        shape = "x".join(map(str, self.images.shape[1:]))
        return f"{len(self)} images of {shape}, {self.describe_labels()}"

    def files(self) -> list[str]:
        """Return the file that ``data.stage_to`` can copy; none for a .npz, which is in memory."""
        return [self.file] if isinstance(self.images, np.memmap) else []

    def use_copies(self, copy_of: Callable[[str], str]) -> None:
        """Read from the copy of the file, ``copy_of(path)``, from now on."""
        if isinstance(self.images, np.memmap):
            self.images = np.load(copy_of(self.file), mmap_mode="r")


def _load(
    path: str, config: ArrayFile.Config
) -> tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]:
    """Load images, labels and extras; a .npy file is memory-mapped. Raises UserError."""
    if not is_file(path):
        raise UserError(f"data: no such file: {path}")
    with explained(f"data: {path} is not a numpy file of numbers"):
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        if config.extras:
            raise UserError(f"data.extras: {path} holds images only; a .npz can hold more")
        return loaded, None, {}
    with loaded:
        check_known(config.images, loaded, f"data.images: {path} has no array {config.images!r}")
        for name in config.extras:
            check_known(name, loaded, f"data.extras: {path} has no array {name!r}")
        key = config.labels
        if key == _LABELS and key not in loaded:
            others = [n for n in loaded.files if n not in (config.images, *config.extras)]
            refuse_misspelled(key, others, "data.labels", path)
            key = None
        if key is not None:
            check_known(key, loaded, f"data.labels: {path} has no array {key!r}")
        with explained(f"data: {path} is damaged, or does not hold numbers only"):
            labels = None if key is None else _unpack(loaded, key, path)
            extras = {name: _unpack(loaded, name, path) for name in config.extras}
            return _unpack(loaded, config.images, path), labels, extras


def _unpack(file: Any, key: str, path: str) -> np.ndarray:
    """Load an array of a .npz file; raises UserError if it does not fit into memory."""
    member = key if key in file.zip.namelist() else f"{key}.npy"
    advice = "a .npy file is mapped instead of loaded"
    check_memory(file.zip.getinfo(member).file_size, f"data: {key!r} of {path}", advice)
    return file[key]


def check_shape(shape: tuple[int, ...], channels: int, file: str) -> None:
    """Raise UserError if ``from_array`` cannot convert an array of this shape to an image.

    With three channels, gray and RGBA shapes are accepted, too.

    Args:
        shape: Shape of an image in the file.
        channels: Number of channels of the image, ``data.channels``.
        file: Path of the file, for the message.
    """
    with explained(f"data.channels={channels}: {file}", ValueError):
        from_array(np.zeros(shape, dtype=np.uint8), channels)


def label_numbers(labels: np.ndarray, file: str) -> tuple[np.ndarray, list[str] | None]:
    """Return the class numbers of labels, int64 (N,), and the class names by number.

    Whole numbers and booleans are kept, and their names are None. Texts are numbered by
    ``number_labels``.

    Args:
        labels: Whole numbers of any dtype, or texts (bytes are UTF-8), (N,).
        file: Path of the file, for the message.

    Raises:
        UserError: If the labels are neither.
    """
    if labels.dtype.kind in "US":
        is_bytes = labels.dtype.kind == "S"
        texts: Any = np.char.decode(labels, "utf-8", "surrogateescape") if is_bytes else labels
        return number_labels(texts.tolist())
    with np.errstate(invalid="ignore"):  # NaN becomes an integer, which is not equal to it
        numbers = labels.astype(np.int64) if labels.dtype.kind in "biuf" else None
    if numbers is None or not np.array_equal(numbers, labels):
        raise UserError(
            f"data.labels: those of {file} are {labels.dtype}; whole numbers or texts are expected"
            " (data.labels=null leaves them out)"
        )
    return numbers, None
