"""Class numbers for the labels of files, columns and folders."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np

from selftask.data.reading.path_table import PathTable
from selftask.errors import UserError

NO_LABEL = -1
_MISSING = {"", "-1", "-1.0"}
_ALIKE = 0.8  # similarity from which a name is taken for a misspelled one: lable, Labels


def number_labels(labels: Sequence[str | int | None]) -> tuple[np.ndarray, list[str] | None]:
    """Return the class numbers of labels, int64 (N,), and the class names by number.

    The number of a missing label (None, "" or -1) is -1. If all others are integers of at least 0,
    such as 3 and 3.0, they are kept, and the names are None. Otherwise the distinct labels are
    sorted and numbered from 0. Integers of 19 digits or more count as names, since not all of them
    fit into 64 bits.
    """
    texts = ["" if label is None else str(label) for label in labels]
    names = sorted({*texts} - _MISSING)
    are_numbers = all(map(_is_number, names))
    numbers = {
        name: int(name.removesuffix(".0")) if are_numbers else number
        for number, name in enumerate(names)
    }
    numbers |= dict.fromkeys(_MISSING, NO_LABEL)
    rows = np.fromiter((numbers[text] for text in texts), dtype=np.int64, count=len(texts))
    return rows, None if are_numbers else names


def _is_number(name: str) -> bool:
    digits = name.removesuffix(".0")  # pandas writes 3 as 3.0 if a label is missing
    return digits.isascii() and digits.isdecimal() and len(digits) < 19


def refuse_misspelled(default: str, names: Sequence[str], key: str, file: str) -> None:
    """Raise UserError if one of ``names`` looks like a misspelling of ``default``.

    Args:
        default: Default name of the labels, which is not in ``names``.
        names: Names of the columns or arrays in the file.
        key: Config key that sets the name of the labels.
        file: Path of the file, for the message.
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
    """Return the top folder of each class, by class number; an empty list without labels."""
    if labels is None:
        return []
    first = np.zeros(int(labels.max()) + 2, dtype=np.int64)  # first row by class; last entry: -1
    first[labels[::-1]] = np.arange(len(labels))[::-1]
    return [paths[row].partition("/")[0] for row in first[:-1].tolist()]
