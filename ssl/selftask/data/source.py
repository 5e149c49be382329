"""What every source of images offers, and a compact table of paths."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

from selftask.data.image import MAX_PIXELS

NO_LABEL = -1


class Source(ABC):
    """A map-style set of images, torch-free and picklable, the same in every process.

    ``source[i]`` is ``(image, label)``: a uint8 RGB array (H, W, 3), not to be changed in place,
    and an int, -1 where there is none.
    It raises BadImage for what cannot be read. Registered sources are dataclasses whose fields are
    the keys of the ``data:`` section; opening (``__post_init__``) raises UserError.
    """

    max_pixels = MAX_PIXELS  # set from data.max_pixels when opened
    labels: Any = None  # (N,) int64 known without reading an image, or None

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Image and label; raises BadImage."""

    @abstractmethod
    def path(self, index: int) -> str:
        """A name of the image for logs and lists."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the log: what was found."""

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without labels."""
        return 0 if self.labels is None else int(self.labels.max(initial=NO_LABEL)) + 1


class PathTable:
    """Paths in one block of bytes, so that workers share them instead of copying them.

    A list of strings is copied page by page into each worker as reference counts are touched;
    a million paths cost it about 100 MB a worker, here nothing.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(path) for path in encoded], out=self._offsets[1:])
        self._blob = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"path {index} of {len(self)}")
        return os.fsdecode(self._blob[self._offsets[index] : self._offsets[index + 1]].tobytes())
