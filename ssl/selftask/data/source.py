"""The contract of image sources."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from selftask.data.reading.class_numbers import NO_LABEL
from selftask.errors import BadImage

ExtraKind: TypeAlias = Literal["image", "text", "array"]

_HASHED = 100_000  # approximate limit of hashed names: a fraction of a second


class Source(ABC):
    """Map-style set of images: picklable, the same in every process, and without torch.

    ``source[i]`` is ``(image, label)``. The image is a uint8 array (H, W, C) that callers must not
    modify in place. C is ``channels``; three channels are red, green and blue. The label is an
    int, -1 if there is none. A sample may have extra fields: ``extras`` names extra images, texts
    (a caption) and arrays (a time, a mask), which ``extra(i, name)`` returns.

    A registered source is a dataclass, whose fields are the keys of the ``data:`` section, or has a
    nested dataclass ``Config`` with these fields. ``__init__`` then takes a ``Config``. It raises
    UserError if the data cannot be opened. Reading raises BadImage if an image or an extra field
    cannot be read.
    """

    channels: int = 3  # of every image
    labels: Any = None  # (N,) int64 if known without reading an image, else None
    extras: Mapping[str, ExtraKind] = {}  # kind of each extra field, by name; never modified
    is_readable: bool = True  # False if only the number of images is known
    _classes: Sequence[str] | None = None  # class names by number

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Return the image, uint8 (H, W, C), and its label; raises BadImage if it is unreadable."""

    def extra(self, index: int, name: str) -> Any:
        """Return an extra field of a sample; ``name`` is a key of ``extras``.

        Returns:
            For an image, uint8 (H, W, C) as in ``source[index]``. For a text, a str; an empty one
            counts as unreadable. For an array, a number or an array of one shape in all samples.

        Raises:
            BadImage: If the field cannot be read.
            KeyError: If the source has no extra fields.
        """
        raise KeyError(name)

    def cut(self, index: int, image: np.ndarray) -> np.ndarray:
        """Return the part (H', W', C) of a file's image (H, W, C) that a sample shows.

        By default, this is the whole image.
        """
        return image

    @abstractmethod
    def path(self, index: int) -> str:
        """Return a name of the image for logs and lists: its path, if it is a file."""

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        """Pass the image names to ``add`` in order; large sources pass only evenly spaced ones."""
        for index in range(0, len(self), max(1, len(self) // _HASHED)):
            add(os.fsencode(self.path(index)) + b"\0")

    def stored_bytes(self, index: int) -> bytes | None:
        """Return bytes of the stored image for fingerprints; None if reading them is expensive.

        The bytes are not decoded and may be only a part of the image. Raises BadImage if they
        cannot be read.
        """
        return None

    def extra_path(self, index: int, name: str) -> str:
        """Return a name of an extra image for logs and lists: its path, if it is a file."""
        return f"{self.path(index)}:{name}"

    @abstractmethod
    def describe(self) -> str:
        """Describe the opened source in one line, for the log."""

    def unreadable(self) -> dict[int, BadImage]:
        """Return an error for each image known to be unreadable before decoding, by index."""
        return {}

    def passed_over(self) -> dict[str, int]:
        """Return the number of unsupported images and archives that are not read, by extension."""
        return {}

    @property
    def num_classes(self) -> int:
        """Largest class number plus 1; 0 if ``labels`` is None or has no class."""
        return 0 if self.labels is None else int(self.labels.max(initial=NO_LABEL)) + 1

    def class_names(self) -> list[str] | None:
        """Return the class names by number; None or empty if labels are numbers or missing."""
        return None if self._classes is None else list(self._classes)

    def renumber(self, numbers: np.ndarray, names: Sequence[str]) -> None:
        """Give the classes other numbers and names.

        ``labels`` must not be None, and reading must return the label given by ``label_of``.

        Args:
            numbers: New number of each class, by its old number, int64 (C,).
            names: Class names by new number.
        """
        self.labels = np.append(numbers, NO_LABEL)[self.labels]  # label -1 selects the last entry
        self._classes = names

    def label_of(self, index: int) -> int:
        """Return an image's entry in ``labels``, or -1 without labels."""
        return NO_LABEL if self.labels is None else int(self.labels[index])

    def describe_labels(self) -> str:
        """Return ``10 classes`` or ``no labels``, for ``describe``."""
        return f"{self.num_classes} classes" if self.num_classes else "no labels"


def channels_of(source: Source) -> int:
    """Return the number of channels of every image; 3 if a user's class has no ``channels``."""
    return getattr(source, "channels", Source.channels)


def extras_of(source: Source) -> Mapping[str, ExtraKind]:
    """Return the extra fields of a source; none if a user's class has no ``extras``."""
    return getattr(source, "extras", Source.extras)


class Delegating(Source):
    """Base class of sources whose images come from other sources."""

    @abstractmethod
    def origin(self, index: int) -> tuple[Source, int]:
        """Return the source of an image, and the index of the image in it."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        source, row = self.origin(index)
        return source[row]

    def extra(self, index: int, name: str) -> Any:
        source, row = self.origin(index)
        return source.extra(row, name)

    def cut(self, index: int, image: np.ndarray) -> np.ndarray:
        source, row = self.origin(index)
        return source.cut(row, image)

    def path(self, index: int) -> str:
        source, row = self.origin(index)
        return source.path(row)

    def stored_bytes(self, index: int) -> bytes | None:
        source, row = self.origin(index)
        return source.stored_bytes(row)

    def extra_path(self, index: int, name: str) -> str:
        source, row = self.origin(index)
        return source.extra_path(row, name)


class Wrapped(Delegating):
    """Base class of sources that wrap another one and delegate to it.

    Only ``renumber`` is not delegated: it changes ``labels``, but not the labels that reading
    returns.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.labels = source.labels
        self.channels, self.extras = channels_of(source), extras_of(source)

    @property
    def num_classes(self) -> int:
        """Number of classes of the wrapped source, even if some have no image in this source."""
        return self.source.num_classes

    def origin(self, index: int) -> tuple[Source, int]:
        return self.source, index

    def class_names(self) -> list[str] | None:
        return self.source.class_names()

    def __len__(self) -> int:
        return len(self.source)

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        self.source.hash_names(add)

    def describe(self) -> str:
        return self.source.describe()

    def unreadable(self) -> dict[int, BadImage]:
        return self.source.unreadable()

    def passed_over(self) -> dict[str, int]:
        return self.source.passed_over()
