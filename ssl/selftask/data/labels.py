"""Class numbers from what data sets write as labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selftask.data.reading.files import BadImage
from selftask.data.source import NO_LABEL, PathTable, Source
from selftask.errors import UserError, nearest

MAX_CLASSES = 10_000_000  # there are as many rows in every head as the largest label says


def number_labels(labels: Sequence[str | int | None]) -> np.ndarray:
    """(N,) int64: labels as they are if all are non-negative integers, else by sorted name.

    None and "" are no label, -1.
    """
    texts = ["" if label is None else str(label) for label in labels]
    names = name_classes(texts)
    if names is None:
        numbers = {text: int(text) for text in {*texts} - {""}}
    else:
        numbers = {name: number for number, name in enumerate(names)}
    numbers[""] = NO_LABEL
    return np.fromiter((numbers[text] for text in texts), dtype=np.int64, count=len(texts))


def name_classes(labels: Sequence[str | int | None]) -> list[str] | None:
    """The name of each class by the number that ``number_labels`` gives it; None for numbers.

    Digits that no 64 bits hold are names.
    """
    names = sorted({"" if label is None else str(label) for label in labels} - {""})
    return None if all(map(_is_number, names)) else names


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 19


def check_labels(source: Source) -> None:
    """Raise UserError for a label that is known and cannot be the number of a class."""
    labels = source.labels
    if labels is None or not len(labels):
        return
    for row in (int(labels.argmin()), int(labels.argmax())):
        if not NO_LABEL <= labels[row] < MAX_CLASSES:
            raise UserError(
                f"data: {source.path(row)} has the label {labels[row]}; numbers are "
                f"those of classes, 0 to {MAX_CLASSES - 1} ({NO_LABEL}: none); texts are numbered"
            )


def count_unlabelled(source: Source) -> int:
    """Return the number of images without a label.

    A source that does not know its labels before reading is judged by its first readable image.
    """
    if source.labels is not None:
        return int((source.labels < 0).sum())
    for index in range(len(source)):
        try:
            return 0 if source[index][1] >= 0 else len(source)
        except BadImage:
            continue
    return 0


def label_top_folders(paths: Sequence[str]) -> np.ndarray | None:
    """Number of each relative path's top folder, in sorted order; None unless there are two.

    A path without a folder has no label, -1.
    """
    tops = [path.partition("/")[0] if "/" in path else None for path in paths]
    numbers = {top: number for number, top in enumerate(sorted({t for t in tops if t is not None}))}
    if len(numbers) < 2:
        return None
    return np.array([NO_LABEL if t is None else numbers[t] for t in tops], dtype=np.int64)


def name_top_folders(paths: Sequence[str] | PathTable, labels: np.ndarray | None) -> list[str]:
    """The top folder that each of these labels stands for, by number; none without labels."""
    if labels is None:
        return []
    first = np.zeros(int(labels.max()) + 2, dtype=np.int64)  # of each class; the last: no label
    first[labels[::-1]] = np.arange(len(labels))[::-1]
    return [paths[row].partition("/")[0] for row in first[:-1].tolist()]


def align_classes(source: Source, model: Source, key: str) -> None:
    """Give each class of ``source`` the number that the class of that name has in ``model``.

    Two sets number their classes apart, so that one class less in one of them would move all that
    follow. Raises UserError, which names the config's ``key``, for a class that the model lacks.
    """
    if not isinstance(source, Source) or not isinstance(model, Source):
        return  # a user's own, which has no names
    ours, theirs = source.class_names(), model.class_names()
    if not ours or not theirs or ours == theirs:
        return
    numbers = {name: number for number, name in enumerate(theirs)}
    for name in ours:
        if name not in numbers:
            raise UserError(
                f"{key}: its class {name!r} is none of the {len(theirs)} of data; "
                f"{nearest(name, theirs)} ({key}=null: no evaluations)"
            )
    source.renumber(np.array([numbers[name] for name in ours], dtype=np.int64))
