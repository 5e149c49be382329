"""Extra fields of a sample, besides image and label, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.source import ExtraKind, Source, Wrapped, channels_of
from selftask.errors import BadImage, UserError

_NUMBERS = {"f": np.float32, "i": np.int64}  # dtype of values that are not arrays, by NumPy kind


class ExtrasReader:
    """Reader of the texts and arrays of a sample.

    Extra images are not read here, since groups of views are made from them.

    Args:
        kinds: Kind of each field to read, by name.
        tokenizer: Function from a text to its token ids, int64 (L,); required if there are texts.
    """

    def __init__(
        self, kinds: Mapping[str, ExtraKind], tokenizer: Callable[[str], np.ndarray] | None = None
    ) -> None:
        self.kinds = kinds
        self.tokenizer = tokenizer

    def read(self, source: Source, index: int) -> dict[str, np.ndarray]:
        """Return the texts of a sample, as token ids int64 (L,), and its arrays of any shape.

        Raises:
            BadImage: If a text is empty or the source cannot read a field.
            UserError: If a value is neither a text nor numbers, as its kind requires.
        """
        return {name: self._read(source, index, name) for name in self.kinds}

    def _read(self, source: Source, index: int, name: str) -> np.ndarray:
        value = source.extra(index, name)
        if self.kinds[name] == "array":
            return as_array(value, source, index, name)
        if not isinstance(value, str):
            raise UserError(
                f"{source.path(index)}: its {name!r} is {value!r:.80}; a text is expected"
            )
        if not value.strip():
            raise BadImage(source.path(index), f"its {name} is empty")
        assert self.tokenizer is not None
        return self.tokenizer(value)


def as_array(value: Any, source: Source, index: int, name: str) -> np.ndarray:
    """Convert numbers of any shape to an array; raises UserError for other values.

    An array keeps its dtype. Other floats become float32, other signed integers int64.

    Args:
        value: Value of the field.
        source: Its source, for messages.
        index: Index of the sample.
        name: Name of the field.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "buif":
        raise UserError(
            f"{source.path(index)}: its {name!r} is {value!r:.80}; a number or an array of "
            "numbers is expected"
        )
    if isinstance(value, np.ndarray):
        return array
    return array.astype(_NUMBERS.get(array.dtype.kind, array.dtype))


def read_extra_image(source: Source, index: int, name: str) -> np.ndarray:
    """Return an extra image of a sample, uint8 (H, W, C).

    Args:
        source: Source of the sample.
        index: Index of the sample.
        name: Name of the extra image.

    Raises:
        BadImage: If it cannot be read.
        UserError: If it has the wrong dtype, shape or number of channels.
    """
    image: np.ndarray = source.extra(index, name)
    channels = channels_of(source)
    if image.ndim != 3 or image.shape[2] != channels or image.dtype != np.uint8:
        raise UserError(
            f"{source.path(index)}: its {name!r} is {image.dtype} of shape {image.shape}; "
            f"an 8-bit image (H, W, {channels}) is expected"
        )
    return image


class ExtraImages(Wrapped):
    """Unlabeled source of the extra images called ``name`` in another source."""

    def __init__(self, source: Source, name: str) -> None:
        super().__init__(source)
        self.name = name
        self.labels = None

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return read_extra_image(self.source, index, self.name), NO_LABEL

    def path(self, index: int) -> str:
        return self.source.extra_path(index, self.name)

    def describe(self) -> str:
        return f"{self.source.describe()}: {self.name}"

    def unreadable(self) -> dict[int, BadImage]:
        return {}
