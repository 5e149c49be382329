"""Class numbers for the labels of data sets."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np

from selftask.data.reading.files import BadImage
from selftask.data.source import NO_LABEL, PathTable, Source
from selftask.errors import UserError, nearest

_ALIKE = 0.8  # similarity from which a name is taken for a misspelt one: lable, Labels
MAX_CLASSES = 10_000_000  # the largest label sets the number of rows in every head


def number_labels(labels: Sequence[str | int | None]) -> np.ndarray:
    """Return the class numbers of labels, int64 (N,).

    If all labels are non-negative integers, they are kept. Otherwise the sorted names are numbered
    from 0. None and "" mean no label, -1.
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
    """Return the class names in the order of ``number_labels``, or None if labels are integers.

    Numbers of 19 digits or more count as names, since not all of them fit 64 bits.
    """
    names = sorted({"" if label is None else str(label) for label in labels} - {""})
    return None if all(map(_is_number, names)) else names


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 19


def check_labels(source: Source) -> None:
    """Raise UserError if a label is neither a valid class number nor -1.

    Labels that are only known after reading an image are not checked.
    """
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

    If labels are only known after reading, the first readable image decides for all images.
    """
    if source.labels is not None:
        return int((source.labels < 0).sum())
    for index in range(len(source)):
        try:
            return 0 if source[index][1] >= 0 else len(source)
        except BadImage:
            continue
    return 0


def is_labelled(source: Source) -> bool:
    """Return whether images of a source have labels, as ``count_unlabelled`` counts them."""
    return count_unlabelled(source) < len(source)


def refuse_misspelt(default: str, names: Sequence[str], key: str, file: str) -> None:
    """Raise UserError if labels that may be missing seem to be there under a misspelt name.

    Args:
        default: Name of the labels, which is none of ``names``.
        names: Names of the columns or arrays in the file.
        key: Config key of the name.
        file: The file, for the message.
    """
    lower = {name.lower(): name for name in names}
    if close := get_close_matches(default, lower, n=1, cutoff=_ALIKE):
        name = lower[close[0]]
        raise UserError(
            f"{key}: {file} has no {default!r}, but {name!r} (of: {', '.join(names)}); "
            f"{key}={name} if it holds the labels, {key}=null if there are none"
        )


def label_top_folders(paths: Sequence[str]) -> np.ndarray | None:
    """Label each relative path by its top folder; the folders are numbered in sorted order.

    Returns:
        int64 (N,), -1 for a path without a folder; None if there are fewer than two top folders.
    """
    tops = [path.partition("/")[0] if "/" in path else None for path in paths]
    numbers = {top: number for number, top in enumerate(sorted({t for t in tops if t is not None}))}
    if len(numbers) < 2:
        return None
    return np.array([NO_LABEL if t is None else numbers[t] for t in tops], dtype=np.int64)


def name_top_folders(paths: Sequence[str] | PathTable, labels: np.ndarray | None) -> list[str]:
    """Return the top folder of each class, by number; an empty list without labels."""
    if labels is None:
        return []
    first = np.zeros(int(labels.max()) + 2, dtype=np.int64)  # first rows; the last is of label -1
    first[labels[::-1]] = np.arange(len(labels))[::-1]
    return [paths[row].partition("/")[0] for row in first[:-1].tolist()]


def align_classes(source: Source, model: Source, key: str) -> None:
    """Renumber the classes of ``source`` so that equal names have the same number as in ``model``.

    Each source numbers its own classes. If one of them lacks a class, all later numbers would be
    shifted.

    Args:
        source: Source to renumber.
        model: Source whose class numbers are used.
        key: Config key of ``source``, for the error message.

    Raises:
        UserError: If ``source`` has a class that ``model`` lacks.
    """
    if not isinstance(source, Source) or not isinstance(model, Source):
        return  # a user's class that does not derive from Source: it has no class names
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
