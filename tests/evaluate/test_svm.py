"""The SVM evaluation: the optimum of the hinge loss, mean average precision, few labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F

from selftask.errors import UserError
from selftask.evaluate.features import Features
from selftask.evaluate.svm import SVM


def blobs(num_images: int, seed: int, spread: float = 0.5) -> Features:
    draws = torch.Generator().manual_seed(seed)
    centers = torch.eye(3, 6)
    targets = torch.arange(num_images) % 3
    features = centers[targets] + spread * torch.randn(num_images, 6, generator=draws)
    return Features(features, targets, torch.arange(num_images))


def hinge_machine(x: np.ndarray, is_class: np.ndarray, cost: float) -> np.ndarray:
    """Weights and bias that minimise eq. 1 of liblinear's paper with a squared hinge, by L-BFGS."""
    sign = np.where(is_class, 1.0, -1.0)
    weight = cost * np.where(is_class, 2.0, 1.0)
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1)  # liblinear decays the bias as well

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        slack = np.maximum(0.0, 1.0 - sign * (rows @ w))
        gradient = w - 2 * rows.T @ (weight * slack * sign)
        return 0.5 * w @ w + float(weight @ slack**2), gradient

    start = np.zeros(rows.shape[1])
    return scipy.optimize.minimize(objective, start, jac=True, tol=1e-12).x


def mean_average_precision(
    scores: np.ndarray, targets: np.ndarray, labels: Sequence[int] = (0, 1, 2)
) -> float:
    """Mean over classes of the precision at the rank of each positive."""
    values = []
    for label in labels:
        order = np.argsort(-scores[:, label], kind="stable")
        hits = (targets[order] == label).astype(float)
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        values.append((precision * hits).sum() / hits.sum())
    return float(np.mean(values))


def test_is_the_optimum_of_the_squared_hinge_loss() -> None:
    train, test = blobs(90, 0), blobs(60, 1)
    row = SVM(costs=[0.5])(train, test)
    x, x_test = (F.normalize(part.features.double(), dim=1).numpy() for part in (train, test))
    ones = np.ones((len(x_test), 1))
    machines = [hinge_machine(x, train.targets.numpy() == label, 0.5) for label in range(3)]
    scores = np.concatenate([x_test, ones], axis=1) @ np.stack(machines, axis=1)
    assert row["svm_top1"] == pytest.approx((scores.argmax(1) == test.targets.numpy()).mean())
    expected = mean_average_precision(scores, test.targets.numpy())
    assert row["svm_map"] == pytest.approx(expected, abs=1e-3)


def test_svm_top1_is_among_the_test_classes() -> None:
    train, test = blobs(90, 0), blobs(60, 1)
    test = test[test.targets != 1]
    x, x_test = (F.normalize(part.features.double(), dim=1).numpy() for part in (train, test))
    rows = np.concatenate([x_test, np.ones((len(x_test), 1))], axis=1)
    machines = [hinge_machine(x, train.targets.numpy() == label, 0.5) for label in range(3)]
    scores = rows @ np.stack(machines, axis=1)
    best = np.array([0, 2])[scores[:, [0, 2]].argmax(axis=1)]
    every, among = (SVM(costs=[0.5], only_test_classes=only)(train, test) for only in (False, True))
    assert among["svm_top1"] == pytest.approx((best == test.targets.numpy()).mean())
    assert among["svm_top1"] > every["svm_top1"]
    expected = mean_average_precision(scores, test.targets.numpy(), labels=(0, 2))
    assert among["svm_map"] == every["svm_map"] == pytest.approx(expected, abs=1e-3)


def test_the_cost_is_chosen_without_the_test_images() -> None:
    train, test = blobs(90, 0), blobs(60, 1)
    shuffled = Features(test.features, test.targets.roll(1), test.indices)
    assert SVM()(train, test)["svm_top1"] > 0.8
    assert SVM()(train, shuffled)["svm_top1"] < 0.3


@pytest.mark.filterwarnings("ignore:Liblinear failed to converge")
def test_the_better_cost_is_chosen_for_training_images() -> None:
    """Classes differ by a small difference of two noisy columns, which needs a high cost."""
    sets = []
    for seed in (0, 1):
        noise = torch.randn(120, generator=torch.Generator().manual_seed(seed))
        targets = torch.arange(120) % 2
        columns = torch.stack([noise + 0.2 * targets, noise, torch.full_like(noise, 3.0)], dim=1)
        sets.append(Features(columns, targets, torch.arange(120)))
    low, high = (SVM(costs=[cost])(*sets) for cost in (1e-4, 1e2))
    assert low["svm_map"] < 0.7 < 0.9 < high["svm_map"]
    assert SVM(costs=[1e-4, 1e2])(*sets) == SVM(costs=[1e2, 1e-4])(*sets) == high


def test_each_fold_has_all_classes_although_the_images_are_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = blobs(90, 0).targets.argsort(stable=True)
    train, folds = blobs(90, 0)[order], list[set[int]]()

    def score(machine: Any, x: Any, y: Any, *, cv: Any, scoring: str) -> np.ndarray:
        folds.extend({*train.targets[test].tolist()} for _, test in cv.split(x, y))
        return np.zeros(3)

    monkeypatch.setattr("sklearn.model_selection.cross_val_score", score)
    SVM()(train, blobs(60, 1))
    assert folds == [{0, 1, 2}] * len(folds) != []


def test_a_class_has_at_most_as_many_folds_as_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cost is used for a class of one image, since no fold could have it."""
    folds: list[int] = []

    def score(machine: Any, x: Any, y: Any, *, cv: Any, scoring: str) -> np.ndarray:
        assert scoring == "average_precision", "as in VISSL"
        folds.append(cv.get_n_splits())
        return np.zeros(3)

    monkeypatch.setattr("sklearn.model_selection.cross_val_score", score)
    train = blobs(90, 0)
    images = torch.cat([(train.targets == c).nonzero()[:n, 0] for c, n in enumerate((1, 2, 30))])
    SVM(costs=[0.1, 1.0])(train[images], blobs(60, 1))
    assert folds == [2, 2, 3, 3]


def test_one_class_is_refused() -> None:
    alone = blobs(90, 0)[blobs(90, 0).targets == 1]
    with pytest.raises(UserError, match="costs: all training images are of class 1"):
        SVM()(alone, alone)


def test_test_images_of_other_classes_are_wrong() -> None:
    train, test = blobs(90, 0), blobs(60, 1)
    others = Features(test.features, test.targets + 3, test.indices)
    assert SVM(costs=[1.0])(train, others) == {"svm_top1": 0.0, "svm_map": 0.0}


def test_few_labels_are_drawn_of_each_class_and_averaged() -> None:
    train, test = blobs(90, 0, spread=0.4), blobs(60, 1, spread=0.4)
    row = SVM(few_labels=[2], repeats=3, costs=[1.0])(train, test)
    assert set(row) == {"svm_top1", "svm_map", "svm_2_labels_top1", "svm_2_labels_map"}
    assert 0.5 < row["svm_2_labels_top1"] <= row["svm_top1"]
    generator = torch.Generator().manual_seed(0)
    draws = [train.draw(2, generator) for _ in range(3)]
    assert [draw.targets.bincount().tolist() for draw in draws] == [[2, 2, 2]] * 3
    alone = [SVM(costs=[1.0])(draw, test)["svm_map"] for draw in draws]
    assert len(set(alone)) == 3
    assert row["svm_2_labels_map"] == pytest.approx(np.mean(alone))
    with pytest.raises(UserError, match=r"few_labels.*31.*has 30 training images"):
        SVM(few_labels=[31])(train, test)
