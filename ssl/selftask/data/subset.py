"""Subsets of a source: a number or fraction of its images or of each class, or disjoint parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from selftask.data.source import Source, Wrapped
from selftask.errors import BadImage, UserError, check_known
from selftask.random.splitmix import hash_words, mix


@dataclass(frozen=True, kw_only=True)
class Part:
    """Settings of ``data.subset``. A float alone means a fraction, an integer a count."""

    fraction: float | None = None  # of the images (or of each class), in (0, 1]
    count: int | None = None  # number of images (or per class); without count and fraction: all
    per_class: bool = False  # select within each class; images without a label are excluded
    seed: int = 0
    part: int | None = None  # number of one of `of` disjoint parts, from 0
    of: int | None = None  # number of disjoint parts

    def __str__(self) -> str:
        words = [f"part {self.part} of {self.of}"] if self.of else []
        if self.fraction is not None:
            words.append(f"{self.fraction:.4g} of {'each class' if self.per_class else 'them'}")
        elif self.count is not None:
            words.append(f"{self.count}{' of each class' if self.per_class else ''}")
        return ", ".join([*words, f"seed {self.seed}"])


class Subset(Wrapped):
    """Subset of a source's images, in their order. Classes keep their numbers.

    The selection depends only on the settings, the number of images and, with ``per_class``, their
    labels. Of two subsets that differ only in ``fraction`` or ``count``, the larger one contains
    the smaller one. Subsets that differ only in ``part`` are disjoint.
    """

    def __init__(self, source: Source, part: Part) -> None:
        super().__init__(source)
        self.part = part
        self.rows = choose(len(source), source.labels, part)  # (N,) int64, sorted
        self.labels = None if source.labels is None else source.labels[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def origin(self, index: int) -> tuple[Source, int]:
        return self.source, int(self.rows[index])

    def renumber(self, numbers: np.ndarray, names: Sequence[str]) -> None:
        """Renumber the classes of the subset and of the wrapped source."""
        super().renumber(numbers, names)
        self.source.renumber(numbers, names)

    def unreadable(self) -> dict[int, BadImage]:
        bad = self.source.unreadable()
        return {i: bad[row] for i, row in enumerate(self.rows.tolist()) if row in bad}

    def describe(self) -> str:
        """Describe the source and the subset in one line.

        Example: ``500 of 1108 images, 20 folders, 0 unreadable (subset: 25 of each class, seed 0)``
        """
        return f"{len(self)} of {self.source.describe()} (subset: {self.part})"


def subset_of(source: Source, value: Any) -> Source:
    """Return the part of a source that ``data.subset`` selects; None selects all of it.

    Raises:
        UserError: If the value is invalid, or as for ``choose``.
    """
    return source if value is None else Subset(source, _read(value))


def _read(value: Any) -> Part:
    """Parse the value of ``data.subset``; raises UserError."""
    if isinstance(value, bool) or not isinstance(value, int | float | dict):
        raise UserError(f"data.subset={value!r}: a fraction, a count or a section is expected")
    if isinstance(value, int):
        value = {"count": value}
    elif isinstance(value, float):
        value = {"fraction": value}
    names = [field.name for field in fields(Part)]
    for name in value:
        check_known(name, names, f"unknown key 'data.subset.{name}'")
    part = Part(**value)
    problem = _problem(part)
    if problem:
        raise UserError(f"data.subset.{problem}")
    return part


def _problem(part: Part) -> str | None:
    for name in ("count", "seed", "part", "of"):
        number = getattr(part, name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            return f"{name}={number!r}: expected a whole number"
    if not isinstance(part.per_class, bool):
        return f"per_class={part.per_class!r}: expected true or false"
    if part.fraction is not None and part.count is not None:
        return "fraction and count: only one of them can be meant"
    if part.fraction is not None and not _is_share(part.fraction):
        return f"fraction={part.fraction!r}: more than 0 and at most 1 (a count is a whole number)"
    if part.count is not None and part.count < 1:
        return f"count={part.count}: must be at least 1"
    if (part.part is None) != (part.of is None):
        return "part and of: one needs the other, as in {part: 0, of: 2}"
    if part.of is not None and part.part is not None and not 0 <= part.part < part.of:
        return f"part={part.part}: the parts of {part.of} are 0 to {part.of - 1}"
    return None


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def choose(size: int, labels: np.ndarray | None, part: Part) -> np.ndarray:
    """Return the sorted indices, int64 (M,), of a subset of ``size`` images.

    Args:
        size: Number of images, N.
        labels: (N,) int64, or None.
        part: Settings of the subset.

    Raises:
        UserError: If there are fewer images than ``count``, or no labels for ``per_class``, or if
            the subset is empty.
    """
    order = _shuffled(size, part.seed)
    if not part.per_class:
        rows = _take(order, part, "images")
    elif labels is None:
        raise UserError("data.subset.per_class needs labels, and these images have none")
    else:
        order = order[np.asarray(labels)[order] >= 0]
        order = order[np.argsort(labels[order], kind="stable")]
        classes, firsts = np.unique(labels[order], return_index=True)
        groups = zip(classes, np.split(order, firsts[1:]), strict=False)
        by_class = (_take(group, part, f"images of class {c}") for c, group in groups)
        rows = np.concatenate([*by_class, np.empty(0, np.int64)])
    if not len(rows):
        raise UserError("data.subset: it holds no image")
    return np.sort(rows)


def _take(order: np.ndarray, part: Part, noun: str) -> np.ndarray:
    if part.of is not None and part.part is not None:
        first, last = (len(order) * n // part.of for n in (part.part, part.part + 1))
        order = order[first:last]
    if part.fraction is not None:
        return order[: max(1, round(part.fraction * len(order)))]
    if part.count is None:
        return order
    if part.count > len(order):
        raise UserError(f"data.subset.count={part.count}: there are {len(order)} {noun}")
    return order[: part.count]


def _shuffled(size: int, seed: int) -> np.ndarray:
    """Shuffle 0..size-1 by hash, since NumPy's generators may change between versions."""
    first = np.uint64(hash_words(seed, 0x737562736574))
    return np.argsort(mix(np.arange(size, dtype=np.uint64) + first), kind="stable")
