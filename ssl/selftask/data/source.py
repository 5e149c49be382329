"""What every source of images offers, and a compact table of paths."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from selftask.data.reading.files import BadImage
from selftask.data.reading.image import MAX_PIXELS

ExtraKind: TypeAlias = Literal["image", "text", "array"]

NO_LABEL = -1
_HASHED = 100_000  # names: a fraction of a second
_PIECE = 1 << 24  # bytes looked through at once


class Source(ABC):
    """A map-style set of images, torch-free and picklable, the same in every process.

    ``source[i]`` is ``(image, label)``: a uint8 array (H, W, C), not to be changed in place, and an
    int, -1 where there is none. C is ``channels``; 3 of them are red, green and blue.
    A sample may have more: ``extras`` names further images, texts (a caption) and arrays (a time, a
    mask), which ``extra(i, name)`` returns.

    It raises BadImage for what cannot be read. Registered sources are dataclasses whose fields are
    the keys of the ``data:`` section; opening (``__post_init__``) raises UserError.
    """

    max_pixels = MAX_PIXELS  # set from data.max_pixels when opened
    channels: int = 3  # of every image
    labels: Any = None  # (N,) int64 known without reading an image, or None
    extras: Mapping[str, ExtraKind] = {}  # of a sample beside image and label; never changed

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Image and label; raises BadImage."""

    def extra(self, index: int, name: str) -> Any:
        """Return one of the ``extras`` of a sample; raises BadImage.

        Returns:
            image: uint8 (H, W, C), as ``source[index]`` gives one. text: a str; an empty one counts
            as unreadable. array: a number or an array whose shape is that of every sample.
        """
        raise KeyError(name)

    def cut(self, index: int, image: np.ndarray) -> np.ndarray:
        """Return what a sample shows of the image in its file: all of it, by default."""
        return image

    @abstractmethod
    def path(self, index: int) -> str:
        """A name of the image for logs and lists."""

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        """Update a hash with the image names in order, or with evenly spaced ones of very many."""
        for index in range(0, len(self), max(1, len(self) // _HASHED)):
            add(os.fsencode(self.path(index)) + b"\0")

    def extra_path(self, index: int, name: str) -> str:
        """Return a name of a further image for logs and lists: its path, if it is a file."""
        return f"{self.path(index)}:{name}"

    @abstractmethod
    def describe(self) -> str:
        """One line for the log: what was found."""

    def unreadable(self) -> dict[int, BadImage]:
        """Return the images that are known to be unreadable before any is decoded, by index."""
        return {}

    def passed_over(self) -> dict[str, int]:
        """Return the number of image-like files that are not read, by extension."""
        return {}

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without labels."""
        return 0 if self.labels is None else int(self.labels.max(initial=NO_LABEL)) + 1

    def class_names(self) -> list[str] | None:
        """What the classes are called, by number; None where their labels are numbers, or none."""
        return None

    def renumber(self, numbers: np.ndarray) -> None:
        """Call class c ``numbers[c]`` from now on; there must be labels, and be ``label_of``'s."""
        self.labels = np.append(numbers, NO_LABEL)[self.labels]  # -1 takes the last one

    def label_of(self, index: int) -> int:
        """The label of an image by ``labels``, -1 without them."""
        return NO_LABEL if self.labels is None else int(self.labels[index])

    def describe_labels(self) -> str:
        """``10 classes`` or ``no labels``: what ``describe`` says of them."""
        return f"{self.num_classes} classes" if self.num_classes else "no labels"


def channels_of(source: Source) -> int:
    """Of every image; 3 of a source that is no ``Source`` and does not say."""
    return getattr(source, "channels", Source.channels)


def extras_of(source: Source) -> Mapping[str, ExtraKind]:
    """Extra fields; none of a source that is no ``Source`` and has none."""
    return getattr(source, "extras", Source.extras)


class Wrapped(Source):
    """A source that answers as another one does, but for what a subclass says itself."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.labels = source.labels

    @property
    def max_pixels(self) -> int:  # type: ignore[override]
        """Largest number of pixels of an image of the wrapped source."""
        return self.source.max_pixels

    @max_pixels.setter
    def max_pixels(self, value: int) -> None:
        self.source.max_pixels = value

    @property
    def channels(self) -> int:  # type: ignore[override]
        """Number of channels of the wrapped source."""
        return channels_of(self.source)

    @property
    def extras(self) -> Mapping[str, ExtraKind]:  # type: ignore[override]
        """Extras of the wrapped source."""
        return extras_of(self.source)

    @property
    def num_classes(self) -> int:
        """Of the whole source: a class that has no image here still has its number."""
        return self.source.num_classes

    def class_names(self) -> list[str] | None:
        """Return the class names of the whole source."""
        return self.source.class_names()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.source[index]

    def extra(self, index: int, name: str) -> Any:
        return self.source.extra(index, name)

    def cut(self, index: int, image: np.ndarray) -> np.ndarray:
        return self.source.cut(index, image)

    def path(self, index: int) -> str:
        return self.source.path(index)

    def extra_path(self, index: int, name: str) -> str:
        return self.source.extra_path(index, name)

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        self.source.hash_names(add)

    def describe(self) -> str:
        return self.source.describe()

    def unreadable(self) -> dict[int, BadImage]:
        return self.source.unreadable()

    def passed_over(self) -> dict[str, int]:
        return self.source.passed_over()


class PathTable:
    """Paths in a few arrays, so that workers share them instead of copying them.

    A list of strings is copied page by page into each worker as reference counts are touched;
    a million paths cost it about 100 MB a worker, here nothing. Paths are kept as names within
    folders, whose paths are kept once; a table made of plain strings has one folder without a name.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._take(arrays_of_paths([os.fsencode(path) for path in paths]))

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> PathTable:
        """A table of arrays that are there: of an index file, most likely.

        ``names``: N names as uint8, each followed by one byte that separates them; ``offsets``
        (N + 1,): where each begins; ``firsts`` (F,): the number of each folder's first name;
        ``folders`` and ``folder_offsets``: the paths of the F folders, likewise.
        """
        table = cls.__new__(cls)
        table._take(arrays)
        return table

    def _take(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._names, self._offsets = arrays["names"], arrays["offsets"]
        self._firsts = arrays["firsts"]
        self._folders, self._folder_offsets = arrays["folders"], arrays["folder_offsets"]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"path {index} of {len(self)}")
        name = _item(self._names, self._offsets, index)
        folder = _item(
            self._folders, self._folder_offsets, int(self._firsts.searchsorted(index, "right")) - 1
        )
        return os.fsdecode(folder + b"/" + name if folder else name)

    def hash_names(self, add: Callable[[bytes], None]) -> None:
        """Give all paths to a hash: the same for equal tables, however they were made."""
        names = np.array(self._names)
        names[self._offsets[1:] - 1] = 0  # separators differ
        add(names.tobytes())
        ends = np.append(self._firsts[1:], len(self))
        for number in np.flatnonzero(ends > self._firsts).tolist():
            folder = _item(self._folders, self._folder_offsets, number)
            add(folder + b"\0%d\0" % self._firsts[number])


def arrays_of_paths(paths: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Those of a ``PathTable`` for whole paths."""
    lengths = np.fromiter((len(path) + 1 for path in paths), np.int64, len(paths))
    names = np.frombuffer(join_bytes(paths, b"\0"), dtype=np.uint8)
    return in_no_folder(names, np.append(0, np.cumsum(lengths)))


def in_no_folder(names: np.ndarray, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a ``PathTable`` whose names are whole paths: one folder without a name."""
    return {
        "names": names,
        "offsets": offsets,
        "firsts": np.zeros(1, dtype=np.int64),
        "folders": np.zeros(1, dtype=np.uint8),
        "folder_offsets": np.array([0, 1]),
    }


def join_bytes(words: Iterable[bytes], separator: bytes) -> bytes:
    """The words, each followed by the separator."""
    return b"".join([word + separator for word in words])


def split_bytes(joined: np.ndarray, separator: bytes) -> np.ndarray:
    """Where each word of N begins, and where the last one ends: (N + 1,) int64."""
    starts = range(0, len(joined), _PIECE)
    ends = [np.flatnonzero(joined[at : at + _PIECE] == separator[0]) + at + 1 for at in starts]
    return np.concatenate([np.zeros(1, dtype=np.int64), *ends])


def _item(words: np.ndarray, offsets: np.ndarray, number: int) -> bytes:
    item: bytes = words[offsets[number] : offsets[number + 1] - 1].tobytes()
    return item
