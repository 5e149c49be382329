"""Decoded images of a source in one file, which processes map and share."""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from selftask.data.reading.files import POLICY
from selftask.data.reading.index import Index, load, write
from selftask.data.source import Source, Wrapped
from selftask.data.sources.concat import Concat
from selftask.data.staging.staged_source import InFiles
from selftask.errors import BadImage, UserError

_VERSION = "2"  # of the file format; other versions are ignored
_ARRAYS = ("offsets", "sizes", "labels", "checksums")  # attributes of a Store in its table
_LOOKED_AT = 8  # images whose pixels are hashed into the name of a store


class DamagedStore(Exception):
    """Raised if the file of pixels, or its table, is damaged."""


class Decoded(Wrapped):
    """A source that reads decoded images from a ``Store``.

    Images that were unreadable when the store was filled stay unreadable. If its file has been
    damaged since, reading raises UserError, and the next start creates the file again.
    """

    def __init__(self, source: Source, store: Store) -> None:
        super().__init__(source)
        self.store = store
        self.images: dict[str, Decoded] = {}  # decoded extra images of the samples, by name

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        try:
            image = self.store.image(index)
        except DamagedStore as error:
            self.store.remove()
            raise UserError(
                f"data.cache: {error}; it is removed: the same command makes it again and continues"
            ) from error
        if image is None:
            raise BadImage(self.path(index), self.store.reasons[index])
        return image, int(self.store.labels[index])

    def extra(self, index: int, name: str) -> Any:
        """Return an extra field: an extra image from its store, or the source's text or array."""
        return self.images[name][index][0] if name in self.images else super().extra(index, name)


class Store:
    """Images of any size in one file, which is first written and then memory-mapped."""

    def __init__(self, num_images: int, channels: int) -> None:
        self.channels = channels  # of each image
        self.offsets = np.zeros(num_images, dtype=np.int64)
        self.sizes = np.zeros((num_images, 2), dtype=np.int64)  # height and width
        self.labels = np.full(num_images, -1, dtype=np.int64)
        self.checksums = np.zeros(num_images, dtype=np.uint32)  # crc32 of the bytes
        self.reasons: dict[int, str] = {}  # why an image could not be read
        self.length = 0  # bytes
        self._blob = np.zeros(0, dtype=np.uint8)
        self._checked: np.ndarray | None = None  # True: checked by this process; None: no checks
        self._files: tuple[Path, Path] | None = None  # pixels and table, unless only in memory

    def put(self, file: IO[bytes], index: int, image: np.ndarray, label: int) -> None:
        """Append one image to the file; raises OSError if it cannot be written.

        Args:
            file: File to append to.
            index: Index of the image.
            image: uint8 (H, W, C).
            label: Its label.
        """
        pixels = np.ascontiguousarray(image).data
        file.write(pixels)
        self.checksums[index] = zlib.crc32(pixels)
        self.offsets[index] = self.length
        self.sizes[index] = image.shape[:2]
        self.labels[index] = label
        self.length += image.nbytes

    def map(self, file: IO[bytes]) -> None:
        """Map the file; writes to the mapped memory stay in this process."""
        file.flush()
        if self.length:
            self._blob = np.memmap(file, dtype=np.uint8, mode="c", shape=(self.length,))

    def image(self, index: int) -> np.ndarray | None:
        """Return an image, uint8 (H, W, C), or None if it was unreadable.

        Raises:
            DamagedStore: If its checksum is wrong. Images of a saved store are checked once in each
                process.
        """
        if index in self.reasons:
            return None
        (height, width), first = self.sizes[index].tolist(), int(self.offsets[index])
        shape = height, width, self.channels
        pixels = self._blob[first : first + math.prod(shape)]
        if self._checked is not None and not self._checked[index]:
            if zlib.crc32(pixels.data) != self.checksums[index]:
                assert self._files is not None
                raise DamagedStore(f"{self._files[0]} has changed since it was written")
            self._checked[index] = True
        return np.asarray(pixels).reshape(shape)

    def save_table(self, path: Path) -> None:
        """Write all data except the pixels to ``path``, atomically; raises OSError."""
        header = {"length": self.length, "reasons": list(self.reasons.items())}
        write(Index(header, {name: getattr(self, name) for name in _ARRAYS}), path)

    def remove(self) -> None:
        """Remove the table of a saved store, so that its file is not used again."""
        if self._files is not None:
            self._files[1].unlink(missing_ok=True)

    @staticmethod
    def open(pixels: Path, table: Path, channels: int) -> Store:
        """Open a saved store.

        Args:
            pixels: File of the pixels.
            table: File of all other data.
            channels: Number of channels of each image.

        Raises:
            DamagedStore: If the table cannot be read, or ``pixels`` has the wrong size.
        """
        saved = load(table)
        if saved is None:
            raise DamagedStore(f"{table} cannot be read")
        store = Store(len(saved.arrays["labels"]), channels)
        vars(store).update(saved.arrays)
        store.length, store.reasons = saved.header["length"], dict(saved.header["reasons"])
        there = pixels.stat().st_size
        if there != store.length:
            raise DamagedStore(f"{pixels} has {there} bytes, and {store.length} were written")
        with open(pixels, "rb") as file:
            store.map(file)
        store._checked = np.zeros(len(store.labels), dtype=bool)
        store._files = pixels, table
        return store


def store_name(source: Source, max_side: int | None) -> str:
    """Return the name of a source's store, which changes if files, pixels or labels change.

    It is a hash of the source's description, the size limits, the name of each image (with size
    and modification time, if it is a file), the files that contain several images, what
    ``hash_names`` adds (such as boxes), the labels, and the pixels of a few images. The pixels are
    included because images of users' own sources may have no files.
    """
    number = len(source)
    parts: list[Any] = [_VERSION, type(source).__name__, source.describe(), number]
    digest = hashlib.sha256(repr([*parts, max_side, POLICY.max_pixels]).encode())
    for index in range(number):
        path = source.path(index)
        digest.update(f"{path}\0{_stamp(path)}\0".encode("utf-8", "surrogateescape"))
    for path in _containers(source):
        digest.update(f"{path}\0{_stamp(path)}\0".encode("utf-8", "surrogateescape"))
    source.hash_names(digest.update)
    if source.labels is not None:
        digest.update(np.ascontiguousarray(source.labels, dtype="<i8").data)
    for index in np.unique(np.linspace(0, number - 1, _LOOKED_AT).astype(int)).tolist():
        try:
            image, label = source[index]
        except BadImage as error:
            digest.update(error.reason.encode())
        else:
            digest.update(f"{image.shape} {label} {zlib.crc32(image.tobytes())}".encode())
    return digest.hexdigest()[:24]


def _containers(source: Source) -> Iterator[str]:
    """Yield the files that contain several images of a source, such as tar files."""
    if isinstance(source, Wrapped | Concat):
        for inner in source.sources if isinstance(source, Concat) else [source.source]:
            yield from _containers(inner)
    elif isinstance(source, InFiles):
        yield from source.files()


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a name within another file
        return None
    return status.st_size, status.st_mtime_ns
