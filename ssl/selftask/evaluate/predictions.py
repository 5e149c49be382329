"""Files of predictions for images: a table of classes, or all scores.

N images, C classes.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selftask.batch import Batch
from selftask.data.source import Source
from selftask.errors import UserError, nearest_path
from selftask.files.paths import is_file

_COLUMNS = ("path", "label", "predicted", "probability")
_ARRAYS = ("paths", "labels", "scores")  # arrays of a .npz; `classes` is optional
_MALFORMED = (ValueError, TypeError, AttributeError, KeyError, csv.Error, zipfile.BadZipFile)


@dataclass(frozen=True)
class Predictions:
    """Content of a file of predictions."""

    paths: Sequence[str]  # N
    labels: np.ndarray  # (N,) int64, -1 for none; (N, C) of 1, 0 and -1 if images have several
    predicted: np.ndarray  # (N,) int64: the class with the highest score
    probability: np.ndarray  # (N,) float64: its softmax
    scores: np.ndarray | None = None  # (N, C) float32; None if the file has classes only
    classes: Sequence[str] | None = None  # names of the C classes


@contextmanager
def prediction_file(path: Path, source: Source) -> Iterator[Callable[[Batch], None]]:
    """Context with a file of predictions; yields a function that appends the images of a batch.

    The ``output`` of a batch has the scores (B, C) of its B images.

    A CSV file has the columns ``path``, ``label`` (empty without one), ``predicted``, the class of
    the highest score, and ``probability``, its softmax. A ``.npz`` file has the arrays ``paths``,
    ``labels``, ``scores`` (N, C), and ``classes`` if the source has their names. The file gets its
    final name when the context ends without an exception.

    Args:
        path: The file.
        source: Source of the images, for their paths.

    Raises:
        UserError: If the file cannot be written, is a CSV file and images have several labels, or
            is a ``.npz`` file and there are no images.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        write = _scores_file if path.suffix == ".npz" else _table
        with write(part, source) as append:
            yield append
        part.replace(path)
    except OSError as error:
        raise UserError(f"predictions={path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _table(part: Path, source: Source) -> Iterator[Callable[[Batch], None]]:
    def append(batch: Batch) -> None:
        if batch.labels.ndim != 1:
            raise UserError(
                "predictions: one label an image is expected in a table, and these have several; "
                "predictions=FILE.npz holds all scores"
            )
        probability, predicted = batch.output.float().softmax(dim=1).max(dim=1)
        columns = (batch.index, batch.labels, predicted, probability)
        for index, label, best, share in zip(*(x.tolist() for x in columns), strict=True):
            cell = label if label >= 0 else ""
            rows.writerow((source.path(index), cell, best, f"{share:.6g}"))

    with part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(_COLUMNS)
        yield append


@contextmanager
def _scores_file(part: Path, source: Source) -> Iterator[Callable[[Batch], None]]:
    paths: list[str] = []
    labels: list[np.ndarray] = []
    scores: list[np.ndarray] = []

    def append(batch: Batch) -> None:
        paths.extend(source.path(index) for index in batch.index.tolist())
        labels.append(batch.labels.cpu().numpy())
        scores.append(batch.output.float().cpu().numpy())

    yield append
    if not scores:
        raise UserError("predictions: there are no images to predict")
    names = source.class_names() if hasattr(source, "class_names") else None
    targets = np.concatenate(labels)
    arrays: dict[str, Any] = {"paths": np.array(paths), "labels": targets}
    arrays["scores"] = np.concatenate(scores)
    if names is not None:
        arrays["classes"] = np.array(names, dtype=str)
    with part.open("wb") as file:
        np.savez(file, **arrays)


def read_predictions(path: Path) -> Predictions:
    """Read a file written by ``prediction_file``.

    Raises:
        UserError: If the file does not exist, has a different format, or has scores that are not
            finite.
    """
    if not is_file(path):
        if path.exists():
            raise UserError(f"{path}: not a regular file")
        raise UserError(f"{path}: there is no such file; {nearest_path(path)}")
    if not path.stat().st_size:
        raise UserError(f"{path}: the file is empty")
    try:
        read = _read_scores(path) if path.suffix == ".npz" else _read_table(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except _MALFORMED as error:
        raise UserError(
            f"{path}: is not what `selftask test RUN predictions=FILE` writes ({error})"
        ) from error
    if broken := int((~np.isfinite(read.probability)).sum()):
        raise UserError(
            f"{path}: the scores of {broken} of {len(read.paths)} images are not finite: the "
            "weights are damaged or training has diverged"
        )
    return read


def _read_table(path: Path) -> Predictions:
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != _COLUMNS:
            raise ValueError(f"its columns are not {', '.join(_COLUMNS)}")
        lines = list(rows)
    return Predictions(
        [line["path"] for line in lines],
        np.array([int(line["label"] or -1) for line in lines], dtype=np.int64),
        np.array([int(line["predicted"]) for line in lines], dtype=np.int64),
        np.array([float(line["probability"]) for line in lines]),
    )


def _read_scores(path: Path) -> Predictions:
    with np.load(path, allow_pickle=False) as file:
        paths, labels, scores = (file[name] for name in _ARRAYS)
        classes = file["classes"].tolist() if "classes" in file else None
    shapes = scores.shape, scores.shape[:1]
    if scores.ndim != 2 or len(paths) != len(scores) or labels.shape not in shapes:
        raise ValueError(f"labels of shape {labels.shape} and scores of shape {scores.shape}")
    if labels.ndim == 1 and labels.max(initial=-1) >= scores.shape[1]:
        raise ValueError(f"label {labels.max()} and scores of {scores.shape[1]} classes")
    with np.errstate(invalid="ignore"):
        odds = np.exp(scores - scores.max(axis=1, keepdims=True), dtype=np.float64)
    odds /= odds.sum(axis=1, keepdims=True)
    best = scores.argmax(axis=1)
    share = odds[np.arange(len(odds)), best]
    return Predictions(paths.tolist(), labels, best, share, scores, classes)
