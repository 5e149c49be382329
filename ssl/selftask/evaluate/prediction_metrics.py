"""Metrics of predictions in a file.

N images, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from selftask.errors import UserError
from selftask.evaluate.predictions import Predictions
from selftask.meters.accuracy import Accuracy
from selftask.meters.mean_average_precision import MeanAveragePrecision, average_precision

_TOP = (1, 5)


def metrics(
    predictions: Predictions, topk: Sequence[int] | None = None, bins: int = 15
) -> dict[str, float]:
    """Return the metrics of a file of predictions, with the names of ``selftask test``.

    A file of scores gives ``mean_average_precision_map`` and, with one label per image,
    ``accuracy_top_K``, both computed by the meters. A table of classes gives ``accuracy_top_1``.
    Both kinds give ``images``, the number of images with a label, and, with one label per image,
    ``ece``.

    Args:
        predictions: Content of the file; images without a label do not count.
        topk: Numbers K; None for 1, and 5 if there are at least 5 classes.
        bins: Number of bins of ``expected_calibration_error``.

    Raises:
        UserError: If no image has a label, or ``topk`` cannot be computed from the file.
    """
    labels, scores = predictions.labels, predictions.scores
    if not (labels >= 0).any():
        raise UserError("predictions: no image has a label to compare with")
    row: dict[str, float] = {"images": int((labels >= 0).reshape(len(labels), -1).any(1).sum())}
    has_label = labels >= 0
    if labels.ndim == 1:
        correct = (predictions.predicted == labels)[has_label]
        row |= _accuracy(predictions, topk)
        row["ece"] = expected_calibration_error(predictions.probability[has_label], correct, bins)
    elif topk is not None:
        raise UserError(f"topk={list(topk)}: these images have several labels each, only a mAP")
    if scores is not None:
        precision = MeanAveragePrecision()
        precision.update(torch.from_numpy(scores), torch.from_numpy(labels))
        row |= {f"{precision.name}_{key}": value for key, value in precision.value.items()}
    return row


def _accuracy(predictions: Predictions, topk: Sequence[int] | None) -> dict[str, float]:
    labels, scores = predictions.labels, predictions.scores
    if scores is None:
        if topk is not None and list(topk) != [1]:
            raise UserError(
                f"topk={list(topk)}: a table has the best class only; write all scores with "
                "`selftask test RUN predictions=FILE.npz`"
            )
        has_label = labels >= 0
        return {"accuracy_top_1": float((predictions.predicted == labels)[has_label].mean())}
    counts = [k for k in _TOP if k <= scores.shape[1]] if topk is None else list(topk)
    meter = Accuracy(topk=counts)
    for problem in meter.problems({}):
        raise UserError(problem)
    meter.update(torch.from_numpy(scores), torch.from_numpy(labels))
    return {f"{meter.name}_{key}": value for key, value in meter.value.items()}


def expected_calibration_error(probability: np.ndarray, correct: np.ndarray, bins: int) -> float:
    """Return the mean absolute gap between confidence and accuracy in bins of confidence.

    Guo et al. (arXiv:1706.04599), eq. 3: sum over bins B of |B| / N * |acc(B) - conf(B)|, with the
    accuracy and the mean confidence of the |B| images in a bin. Bin m of M contains confidences in
    ((m - 1) / M, m / M].

    Args:
        probability: (N,), probability of the predicted class, in [0, 1].
        correct: (N,) bool.
        bins: Number of bins of equal width, M.
    """
    bin_of = np.clip(np.ceil(probability * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=correct - probability, minlength=bins)
    return float(np.abs(gaps).sum() / len(probability))


def class_table(predictions: Predictions) -> list[dict[str, Any]]:
    """Return a row for each class: label, name and metrics; an undefined metric is ``""``.

    With one label per image, the metrics are ``images``, ``predicted`` as this class, ``recall``,
    ``precision`` and ``f1``, and ``average_precision`` if there are scores. With several labels per
    image, they are ``images`` with the label, and ``average_precision``.
    """
    labels = predictions.labels
    rows = [{"label": label, "name": name} for label, name in enumerate(_class_names(predictions))]
    if labels.ndim == 1:
        true, best = (part[labels >= 0] for part in (labels, predictions.predicted))
        columns = (np.bincount(x, minlength=len(rows)) for x in (true[true == best], true, best))
        for row, hits, images, predicted in zip(rows, *columns, strict=True):
            row |= {"images": int(images), "predicted": int(predicted)}
            row |= {"recall": _share(hits, images), "precision": _share(hits, predicted)}
            row["f1"] = _share(2 * hits, images + predicted)
    if predictions.scores is not None:
        for label, row in enumerate(rows):
            positive = labels == label if labels.ndim == 1 else labels[:, label] == 1
            has_label = labels >= 0 if labels.ndim == 1 else labels[:, label] >= 0
            row["images"] = int(positive.sum())
            row["average_precision"] = (
                average_precision(positive[has_label], predictions.scores[has_label, label])
                if positive.any()
                else ""
            )
    return rows


def confusion(predictions: Predictions) -> np.ndarray:
    """Return the confusion matrix (C, C), int64: rows are labels, columns are predicted classes.

    Images without a label do not count.

    Raises:
        UserError: If images have several labels.
    """
    labels = predictions.labels
    if labels.ndim != 1:
        raise UserError("confusion: these images have several labels each; one is expected")
    size = len(_class_names(predictions))
    has_label = labels >= 0
    pairs = labels[has_label] * size + predictions.predicted[has_label]
    return np.bincount(pairs, minlength=size * size).reshape(size, size)


def _class_names(predictions: Predictions) -> Sequence[str]:
    """Return the names of all classes, or their numbers."""
    if predictions.scores is not None:
        size = predictions.scores.shape[1]
    else:
        size = 1 + int(max(predictions.labels.max(), predictions.predicted.max()))
    names = list(map(str, predictions.classes or ()))
    return [*names[:size], *map(str, range(len(names), size))]


def _share(part: float, total: float) -> float | str:
    return float(part / total) if total else ""
