"""Predicted classes of images, as a table."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from selftask.batch import Batch
from selftask.data.source import Source
from selftask.errors import UserError


@contextmanager
def prediction_file(path: Path, source: Source) -> Iterator[Callable[[Batch], None]]:
    """Context of a CSV file; yields a function that appends the images of a batch.

    The columns are ``path``, ``label`` (empty without one), ``predicted``, the class of the highest
    score, and ``probability``, its softmax. The file gets its name when the context ends without an
    exception.

    Args:
        path: The file.
        source: The images, for their paths.

    Raises:
        UserError: If the file cannot be written, or images have several labels.
    """

    def append(batch: Batch) -> None:
        if batch.labels.ndim != 1:
            raise UserError("predictions: one label an image is expected, and these have several")
        probability, predicted = batch.output.float().softmax(dim=1).max(dim=1)
        columns = (batch.index, batch.labels, predicted, probability)
        for index, label, best, share in zip(*(x.tolist() for x in columns), strict=True):
            known = label if label >= 0 else ""
            rows.writerow((source.path(index), known, best, f"{share:.6g}"))

    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("path", "label", "predicted", "probability"))
            yield append
        part.replace(path)
    except OSError as error:
        raise UserError(f"predictions={path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
