"""Linear support vector machines on frozen features, with all labels or few labels per class.

Goyal et al., Scaling and Benchmarking Self-Supervised Visual Representation Learning, ICCV 2019,
arXiv:1905.01235, section 5.1. One machine per class separates it from all other classes. Features
have unit length, images of the class have twice the weight, and the cost is chosen by
cross-validation.

N images, E features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from selftask.config.fields import setting
from selftask.distributed.heartbeat import track
from selftask.evaluate.features import Features
from selftask.evaluate.figure import Figure
from selftask.evaluate.label_counts import FewLabels, LabelCounts
from selftask.registry import register_evaluation


@register_evaluation("svm")
@dataclass(frozen=True, kw_only=True)
class SVM(FewLabels):
    """Linear SVM: svm_top1 and svm_map with all labels, svm_4_labels_top1 with 4 labels per class.

    ``map`` is the mean over classes of the average precision, the area under the precision-recall
    curve. The cost of each class is chosen on training images only.
    """

    costs: list[float] = setting([0.01, 0.1, 1.0, 10.0], above=0, nonempty=True)
    """Costs to choose from: weights of the squared hinge loss, C in scikit-learn."""
    folds: int = setting(3, min=2)
    """Number of folds of the cross-validation that chooses the cost, at most the number of images
    of the class. With one image of a class, the first cost is used.
    """
    iterations: int = setting(2000, min=1)
    """Maximum number of iterations of liblinear."""

    def label_problems(self, counts: LabelCounts) -> Iterator[str]:
        yield from super().label_problems(counts)
        if len(counts.classes) == 1:
            name = counts.name(counts.classes[0])
            yield f"costs: all training images are of class {name}; an SVM needs two or more"

    def __call__(self, train: Features, test: Features) -> dict[str, float]:
        """Return the accuracy and mean average precision of test images, by metric name.

        Raises:
            UserError: If images have no labels, a class has fewer images than an entry of
                ``few_labels``, or there is one class only.
        """
        self.check(train, test, "SVM")
        generator = torch.Generator().manual_seed(self.seed)
        row: dict[str, float] = {}
        for name, draws in self.draws(train, generator):
            row |= self._mean(draws, test, f"svm{name}")
        return row

    def _mean(self, draws: list[Features], test: Features, name: str) -> dict[str, float]:
        results = [self._fit_and_test(draw, test) for draw in track("SVM", draws)]
        top1, precision = zip(*results, strict=True)
        return {f"{name}_top1": Figure.of_draws(top1), f"{name}_map": float(np.mean(precision))}

    def _fit_and_test(self, train: Features, test: Features) -> tuple[Figure, float]:
        """Return top-1 accuracy and mean average precision of the test images."""
        from sklearn.metrics import average_precision_score

        x, y = _unit_rows(train), train.targets.cpu().numpy()
        x_test, y_test = _unit_rows(test), test.targets.cpu().numpy()
        classes = np.unique(y)
        scores = np.stack([self._scores(x, y == label, x_test) for label in classes], axis=1)
        precision = [
            average_precision_score(y_test == label, scores[:, column])
            for column, label in enumerate(classes)
            if (y_test == label).any()
        ]
        if self.only_test_classes:
            scores[:, ~np.isin(classes, y_test)] = -np.inf
        top1 = classes[scores.argmax(axis=1)] == y_test
        return Figure.of_scores(top1), float(np.mean(precision)) if precision else 0.0

    def _scores(self, x: np.ndarray, is_class: np.ndarray, x_test: np.ndarray) -> np.ndarray:
        """Return the decision function (N,) of test images for one class against the others."""
        from sklearn.model_selection import StratifiedKFold, cross_val_score

        cost = self.costs[0]
        folds = min(self.folds, int(is_class.sum()), int((~is_class).sum()))
        if len(self.costs) > 1 and folds > 1:
            split = StratifiedKFold(folds, shuffle=True, random_state=self.seed)  # of all classes
            means = [
                cross_val_score(
                    self._machine(cost), x, is_class, cv=split, scoring="average_precision"
                ).mean()
                for cost in self.costs
            ]
            cost = self.costs[int(np.argmax(means))]
        return self._machine(cost).fit(x, is_class).decision_function(x_test)

    def _machine(self, cost: float) -> Any:
        from sklearn.svm import LinearSVC

        weights = {True: 2.0, False: 1.0}
        return LinearSVC(
            C=cost,
            dual=True,
            class_weight=weights,
            max_iter=self.iterations,
            random_state=self.seed,
        )


def _unit_rows(part: Features) -> np.ndarray:
    return F.normalize(part.features.double(), dim=1).cpu().numpy()
