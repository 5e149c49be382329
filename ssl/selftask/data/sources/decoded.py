"""The pictures of another source, decoded once and kept: bytes in one file that processes share."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from selftask.data.reading import BadImage
from selftask.data.source import Source, Wrapped

_VERSION = "1"  # of the files; others are not read
_LOOKED_AT = 8  # pictures that are compared when a kept file is found


class Decoded(Wrapped):
    """``source`` as a ``Store`` keeps it; what could not be read then is bad now, too."""

    def __init__(self, source: Source, store: Store) -> None:
        super().__init__(source)
        self.store = store

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        picture = self.store.picture(index)
        if picture is None:
            raise BadImage(self.path(index), self.store.reasons[index])
        return picture, int(self.store.labels[index])


class Store:
    """Pictures of any sizes one after the other in a file, which is written and then mapped."""

    def __init__(self, num_images: int, channels: int) -> None:
        self.channels = channels  # of each
        self.offsets = np.zeros(num_images, dtype=np.int64)
        self.sizes = np.zeros((num_images, 2), dtype=np.int64)  # height and width
        self.labels = np.full(num_images, -1, dtype=np.int64)
        self.reasons: dict[int, str] = {}  # why a picture could not be read
        self.length = 0  # bytes
        self._blob = np.zeros(0, dtype=np.uint8)

    def put(self, file: IO[bytes], index: int, picture: np.ndarray, label: int) -> None:
        """Append one picture; raises OSError."""
        file.write(np.ascontiguousarray(picture).data)
        self.offsets[index] = self.length
        self.sizes[index] = picture.shape[:2]
        self.labels[index] = label
        self.length += picture.nbytes

    def map(self, file: IO[bytes]) -> None:
        """Read from the file from now on; changes to what is read stay this process's own."""
        file.flush()
        if self.length:
            self._blob = np.memmap(file, dtype=np.uint8, mode="c", shape=(self.length,))

    def picture(self, index: int) -> np.ndarray | None:
        """uint8 (H, W, C), or None for one that could not be read."""
        if index in self.reasons:
            return None
        (height, width), first = self.sizes[index].tolist(), int(self.offsets[index])
        shape = height, width, self.channels
        return np.asarray(self._blob[first : first + math.prod(shape)]).reshape(shape)

    def save_table(self, path: Path) -> None:
        """What is needed beside the file; appears whole or not at all."""
        new = path.with_suffix(f".{os.getpid()}.npz")
        reasons = json.dumps({str(index): why for index, why in self.reasons.items()})
        np.savez(
            new,
            offsets=self.offsets,
            sizes=self.sizes,
            labels=self.labels,
            length=np.array(self.length),
            reasons=np.array(reasons),
        )
        os.replace(new, path)

    @staticmethod
    def open(pixels: Path, table: Path, channels: int) -> Store:
        """What ``save_table`` and the file beside it hold."""
        with np.load(table) as saved:
            store = Store(len(saved["labels"]), channels)
            store.offsets, store.sizes = saved["offsets"], saved["sizes"]
            store.labels, store.length = saved["labels"], int(saved["length"])
            reasons: dict[str, str] = json.loads(str(saved["reasons"]))
        store.reasons = {int(index): why for index, why in reasons.items()}
        with open(pixels, "rb") as file:
            store.map(file)
        return store


def fingerprint(source: Source, shrink: int | None) -> str:
    """A name for the decoded pictures of a source: another one for other files or other pixels.

    Made of all names, of the size and time of those that are files, and of a few pictures, which
    tell what is no file apart.
    """
    number = len(source)
    what: list[Any] = [_VERSION, type(source).__name__, source.describe(), number]
    digest = hashlib.sha256(repr([*what, shrink, source.max_pixels]).encode())
    for index in range(number):
        path = source.path(index)
        digest.update(f"{path}\0{_stamp(path)}\0".encode("utf-8", "surrogateescape"))
    for index in np.unique(np.linspace(0, number - 1, _LOOKED_AT).astype(int)).tolist():
        try:
            image, label = source[index]
        except BadImage as error:
            digest.update(error.reason.encode())
        else:
            digest.update(f"{image.shape} {label} {zlib.crc32(image.tobytes())}".encode())
    return digest.hexdigest()[:24]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a name within something else
        return None
    return status.st_size, status.st_mtime_ns
