"""Checks of the labels of sources, and alignment of class numbers between sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.source import Source
from selftask.errors import BadImage, UserError, nearest
from selftask.logs import get_logger

log = get_logger(__name__)

_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}
MAX_CLASSES = 10_000_000  # the largest label sets the number of rows in every head


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


def split_problems(names: Iterable[object] | None) -> Iterator[str]:
    """Yield a problem if all classes have names of parts of a data set, such as train and test."""
    found = {str(name).lower() for name in names or ()}
    if len(found) > 1 and found <= _SPLITS:
        yield (
            f"data: its classes are {', '.join(sorted(found))}: these are parts of a data set; "
            "name the parts themselves, such as data=DIR/train data.val=DIR/val"
        )


def count_unlabeled(source: Source) -> int:
    """Return the number of images without a label.

    If labels are only known after reading, the first readable image decides for all images. The
    number is 0 if none is readable.
    """
    if source.labels is not None:
        return int((source.labels < 0).sum())
    if not source.is_readable:
        return 0
    for index in range(len(source)):
        try:
            return 0 if source[index][1] >= 0 else len(source)
        except BadImage:
            continue
    return 0


def is_labeled(source: Source) -> bool:
    """Return whether any image of a source has a label, according to ``count_unlabeled``."""
    return count_unlabeled(source) < len(source)


def _has_labels(source: Source) -> bool:
    return source.labels is not None and bool((source.labels >= 0).any())


def align_classes(source: Source, model: Source, key: str) -> None:
    """Renumber the classes of ``source`` so that equal names have the same number as in ``model``.

    Each source numbers its own classes, so a class that is missing in ``source`` would shift all
    later numbers. Nothing is changed if one of the sources has no class names. If that one has
    labels, which are then numbers, and the other too, a warning is logged.

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
    if bool(ours) != bool(theirs) and _has_labels(source) and _has_labels(model):
        names = ours or theirs or []
        log.warning(
            "the classes of %s have names, those of %s are numbers: 0 is taken as %r, and so on in "
            "the order of the names",
            *((key, "data") if ours else ("data", key)),
            names[0],
        )
    if not ours or not theirs or ours == theirs:
        return
    numbers = {name: number for number, name in enumerate(theirs)}
    for name in ours:
        if name not in numbers:
            raise UserError(
                f"{key}: its class {name!r} is none of the {len(theirs)} of data; "
                f"{nearest(name, theirs)} ({key}=null: no evaluations)"
            )
    source.renumber(np.array([numbers[name] for name in ours], dtype=np.int64), theirs)
