"""A compact table of paths, and lists of names in one array."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

_PIECE = 1 << 24  # bytes searched at once


class PathTable:
    """Paths in a few arrays, so that workers share them instead of copying them.

    Reference counting copies a list of strings page by page into each forked worker: about 100 MB
    per worker for a million paths. Arrays stay shared. Paths are stored as names within folders,
    and the path of each folder is stored once. A table made from plain strings has one folder
    without a name.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Create a table from existing arrays, such as those of an index file.

        Args:
            arrays: ``names``: N names as uint8, each followed by a one-byte separator;
                ``offsets`` (N + 1,): start of each name, and the end of the last; ``firsts``
                (F,): index of each folder's first name; ``folders`` and ``folder_offsets``: the
                paths of the F folders in the same format.
        """
        self._names, self._offsets = arrays["names"], arrays["offsets"]
        self._firsts = arrays["firsts"]
        self._folders, self._folder_offsets = arrays["folders"], arrays["folder_offsets"]

    @classmethod
    def of(cls, paths: Iterable[str]) -> PathTable:
        """Return a table of these paths."""
        return cls(arrays_of_paths([os.fsencode(path) for path in paths]))

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
        """Pass all paths to ``add``, a hash's update method.

        Tables with the same paths in the same folders give the same hash.
        """
        names = np.array(self._names)
        names[self._offsets[1:] - 1] = 0  # equal tables may have different separators
        add(names.tobytes())
        ends = np.append(self._firsts[1:], len(self))
        for number in np.flatnonzero(ends > self._firsts).tolist():
            folder = _item(self._folders, self._folder_offsets, number)
            add(folder + b"\0%d\0" % self._firsts[number])


def arrays_of_paths(paths: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Return the arrays of a ``PathTable`` of these paths, all in one unnamed folder."""
    lengths = np.fromiter((len(path) + 1 for path in paths), np.int64, len(paths))
    names = np.frombuffer(join_bytes(paths, b"\0"), dtype=np.uint8)
    return in_no_folder(names, np.append(0, np.cumsum(lengths)))


def in_no_folder(names: np.ndarray, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of a ``PathTable`` whose names are whole paths, in one unnamed folder.

    ``names`` and ``offsets`` (N + 1,) are those of a ``PathTable``.
    """
    return {
        "names": names,
        "offsets": offsets,
        "firsts": np.zeros(1, dtype=np.int64),
        "folders": np.zeros(1, dtype=np.uint8),
        "folder_offsets": np.array([0, 1]),
    }


def join_bytes(words: Iterable[bytes], separator: bytes) -> bytes:
    """Return the words joined, each followed by the separator."""
    return b"".join([word + separator for word in words])


def split_bytes(joined: np.ndarray, separator: bytes) -> np.ndarray:
    """Return the start of each of N words, and the end of the last one, int64 (N + 1,).

    ``joined``, uint8 (L,), has the one-byte ``separator`` after each word, as from ``join_bytes``.
    """
    starts = range(0, len(joined), _PIECE)
    ends = [
        np.flatnonzero(joined[first : first + _PIECE] == separator[0]) + first + 1
        for first in starts
    ]
    return np.concatenate([np.zeros(1, dtype=np.int64), *ends])


def _item(words: np.ndarray, offsets: np.ndarray, number: int) -> bytes:
    return words[offsets[number] : offsets[number + 1] - 1].tobytes()
