"""k-NN accuracy by class, worst classes first, and their most frequent wrong predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from selftask.evaluate.nearest import Bank
from selftask.models.feature_queue import class_votes
from selftask.report.images.gather import Gathered
from selftask.report.images.sprite import image_section
from selftask.report.page import Section, render

_K, _TEMPERATURE = 20, 0.07  # as in evaluate.knn.KNN
_SHOWN = 15  # visible rows of the table; the others are folded
_MOST_IN_MATRIX = 20  # largest number of classes in a confusion matrix


@dataclass(frozen=True)
class ByClass:
    """Confusion matrix (C, C) of the classes in ``labels`` (C,); rows are true classes.

    Every class has images.
    """

    confusion: np.ndarray
    labels: np.ndarray

    @property
    def classes(self) -> np.ndarray:
        """Indices of the classes, lowest accuracy first."""
        return np.argsort(self.accuracy, kind="stable")

    @property
    def accuracy(self) -> np.ndarray:
        """Fraction of correct predictions for each class (C,)."""
        return np.asarray(self.confusion.diagonal() / self.confusion.sum(axis=1))

    @property
    def overall(self) -> float:
        """Fraction of correct predictions for all images."""
        return float(self.confusion.trace() / self.confusion.sum())

    def mistakes(self, number: int) -> list[tuple[int, int]]:
        """Return the classes wrongly predicted for class ``number``, the most frequent first.

        Each is a pair of the index of the predicted class and the number of images.

        Args:
            number: Index of the true class in ``labels``.
        """
        row = self.confusion[number].copy()
        row[number] = 0
        order = np.argsort(-row, kind="stable")
        return [(int(other), int(row[other])) for other in order if row[other]]


def by_class(features: np.ndarray, labels: np.ndarray) -> ByClass:
    """Return the confusion matrix of k-NN; each image is classified by the other labeled images.

    As in the evaluation ``knn``, 20 neighbors vote, or all others if there are fewer.

    Args:
        features: (N, E).
        labels: (N,), -1 for images to exclude; at least two images need a label.
    """
    has_label = labels >= 0
    rows = F.normalize(torch.from_numpy(features[has_label]), dim=1)
    present, numbers = np.unique(labels[has_label], return_inverse=True)
    targets = torch.from_numpy(numbers)
    itself = torch.arange(len(rows))
    cosine, row = Bank(rows).nearest(rows, min(_K, len(rows) - 1), itself)
    votes = class_votes(cosine, targets[row], len(present), _TEMPERATURE)
    confusion = np.zeros((len(present), len(present)), dtype=np.int64)
    np.add.at(confusion, (numbers, votes.argmax(dim=1).numpy()), 1)
    return ByClass(confusion, present)


def class_section(images: Gathered) -> Section:
    """Return the section with the table, and a confusion matrix if there are few classes.

    It is empty if the labeled images have fewer than two classes.
    """
    labels = images.labels
    if len(np.unique(labels[labels >= 0])) < 2:
        return Section("Classes", "", "classes")
    result = by_class(images.features, labels)
    html = render(
        "images.classes",
        images,
        result,
        int((labels >= 0).sum()),
        _K,
        _majority(result),
        _SHOWN,
        len(result.classes) <= _MOST_IN_MATRIX,
    )
    return image_section("k-NN accuracy by class", html, "classes")


def _majority(result: ByClass) -> float:
    counts = result.confusion.sum(axis=1)
    return float(counts.max() / counts.sum())
