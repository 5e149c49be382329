"""Class numbers from what data sets write as labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selftask.data.source import NO_LABEL


def number_labels(labels: Sequence[str | int | None]) -> np.ndarray:
    """(N,) int64: labels as they are if all are non-negative integers, else by sorted name.

    None and "" are no label, -1.
    """
    texts = ["" if label is None else str(label) for label in labels]
    names = sorted({text for text in texts if text})
    if all(name.isascii() and name.isdecimal() for name in names):
        numbers = {name: int(name) for name in names}
    else:
        numbers = {name: number for number, name in enumerate(names)}
    numbers[""] = NO_LABEL
    return np.fromiter((numbers[text] for text in texts), dtype=np.int64, count=len(texts))


def label_top_folders(paths: Sequence[str]) -> np.ndarray | None:
    """Number of each relative path's top folder, in sorted order; None unless there are two.

    A path without a folder has no label, -1.
    """
    tops = [path.partition("/")[0] if "/" in path else None for path in paths]
    numbers = {top: number for number, top in enumerate(sorted({t for t in tops if t is not None}))}
    if len(numbers) < 2:
        return None
    return np.array([NO_LABEL if t is None else numbers[t] for t in tops], dtype=np.int64)
