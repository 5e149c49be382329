"""The linear probe against scikit-learn's logistic regression."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from selftask.errors import UserError
from selftask.evaluate import linear
from selftask.evaluate.features import Features
from selftask.evaluate.linear import Linear
from selftask.registry import EVALUATIONS


@pytest.fixture(scope="module")
def digits() -> tuple[Features, Features]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    sets = [
        Features(torch.tensor(x[i]).float(), torch.tensor(y[i]).long(), torch.tensor(i))
        for i in (order[:1200], order[1200:])
    ]
    return sets[0], sets[1]


def _sklearn(train: Features, test: Features, weight_decay: float) -> float:
    scaler = StandardScaler().fit(train.features.numpy())
    model = LogisticRegression(C=1 / (weight_decay * len(train)), max_iter=2000)
    model.fit(scaler.transform(train.features.numpy()), train.targets.numpy())
    return float(model.score(scaler.transform(test.features.numpy()), test.targets.numpy()))


def test_is_as_good_as_scikit_learn(digits: tuple[Features, Features]) -> None:
    train, test = digits
    reference = max(_sklearn(train, test, wd) for wd in (1e-4, 1e-3, 1e-2))
    got = Linear()(train, test)["linear_top1"]
    assert abs(got - reference) < 0.02


@pytest.mark.parametrize("weight_decay", [1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("rows", [8192, 100])
def test_finds_the_minimum_that_scikit_learn_finds(
    weight_decay: float,
    rows: int,
    digits: tuple[Features, Features],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_ROWS", rows)
    train, test = linear._standardized(*digits)
    problem = linear._Problem(train, 500)
    weights = problem.fit(weight_decay, start=problem.fit(0.1, tolerance=1e-2), tolerance=1e-6)
    model = LogisticRegression(C=1 / (weight_decay * len(train)), max_iter=5000, tol=1e-8)
    model.fit(train.features.double().numpy(), train.targets.numpy())
    expected = torch.tensor(model.predict_log_proba(test.features.double().numpy()))
    z = (test.features - problem.mean) @ problem.basis
    got = linear._logits(z, weights).T.log_softmax(dim=1)
    assert (got - expected).abs().mean() < 0.02
    reference = model.score(test.features.double().numpy(), test.targets.numpy())
    assert problem.accuracy(weights, test) == pytest.approx(reference, abs=1.5 / len(test))
    held_out = problem.held_out(weights, z, test.targets)
    assert held_out.accuracy == pytest.approx(problem.accuracy(weights, test))
    assert held_out.loss == pytest.approx(log_loss(test.targets, expected.exp()), rel=0.02)


def test_linear_top1_is_among_the_test_classes(digits: tuple[Features, Features]) -> None:
    train, test = digits
    train = train[torch.arange(150)]
    test = test[torch.isin(test.targets, torch.tensor([1, 8]))]
    x, x_test = (part.features.double().numpy() for part in linear._standardized(train, test))
    model = LogisticRegression(C=1 / (0.01 * len(train)), max_iter=5000, tol=1e-8)
    model.fit(x, train.targets.numpy())
    scores = model.decision_function(x_test)[:, [1, 8]]
    expected = (np.array([1, 8])[scores.argmax(axis=1)] == test.targets.numpy()).mean()
    actual = [
        Linear(weight_decay=[0.01], only_test_classes=only)(train, test)["linear_top1"]
        for only in (False, True)
    ]
    assert actual[0] < actual[1] == pytest.approx(expected, abs=1.5 / len(test))


@pytest.mark.parametrize("seed", [13, 38, 42])
def test_the_weight_decay_is_the_best_on_held_out_images(seed: int) -> None:
    """Noisy classes; by scikit-learn on the same held-out images, then fitted to all images.

    The best decay is neither that of the smallest loss nor that of a smaller held-out share.
    """
    decays, draws = [1.0, 10.0, 0.1, 0.03], torch.Generator().manual_seed(seed)
    centers = torch.randn(3, 40, generator=draws) * torch.linspace(1, 0, 40)
    sets = []
    for count in (120, 600):
        targets = torch.arange(count) % 3
        noise = 2.5 * torch.randn(count, 40, generator=draws)
        sets.append(Features(centers[targets] + noise, targets, torch.arange(count)))
    x, x_test = (part.features.double().numpy() for part in linear._standardized(*sets))
    y, y_test = (part.targets.numpy() for part in sets)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(5)).numpy()
    held, kept = order[:72], order[72:]

    def fit(rows: np.ndarray, decay: float) -> LogisticRegression:
        model = LogisticRegression(C=1 / (decay * len(rows)), max_iter=5000, tol=1e-8)
        return model.fit(x[rows], y[rows])

    best = max(decays, key=lambda decay: fit(kept, decay).score(x[held], y[held]))
    actual = Linear(weight_decay=decays, held_out=0.6, seed=5)(*sets)["linear_top1"]
    assert actual == pytest.approx(fit(order, best).score(x_test, y_test), abs=1.5 / 600)


def test_few_labels_grow_towards_all(digits: tuple[Features, Features]) -> None:
    train, test = digits
    probe = Linear(few_labels=[1, 10], repeats=3)
    state = torch.get_rng_state()
    got = probe(train, test)
    assert torch.equal(torch.get_rng_state(), state)
    assert got == probe(train, test)
    assert 0.3 < got["linear_1_labels_top1"] < got["linear_10_labels_top1"] < got["linear_top1"]
    few = train.draw(10, torch.Generator().manual_seed(0))
    assert few.targets.bincount().tolist() == [10] * 10
    assert len(few.indices.unique()) == 100


@pytest.mark.parametrize(
    ("method", "few", "metric"),
    [
        ("draw", {"few_labels": [1]}, "linear_1_labels_top1"),
        ("draw_share", {"few_shares": [0.001]}, "linear_0.1_percent_top1"),  # at least one
    ],
)
def test_few_labels_are_the_mean_of_scikit_learns_draws(
    method: str,
    few: dict[str, Any],
    metric: str,
    digits: tuple[Features, Features],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws: list[Features] = []
    draw = getattr(Features, method)
    monkeypatch.setattr(Features, method, lambda *args: draws.append(draw(*args)) or draws[-1])
    actual = Linear(**few, repeats=3, weight_decay=[0.01])(*digits)
    test = linear._standardized(*digits)[1]
    expected = []
    for drawn in draws:
        assert drawn.targets.bincount().tolist() == [1] * 10
        model = LogisticRegression(C=1 / (0.01 * 10), max_iter=5000, tol=1e-8)
        model.fit(drawn.features.double().numpy(), drawn.targets.numpy())
        expected.append(model.score(test.features.double().numpy(), test.targets.numpy()))
    assert len(set(expected)) == 3
    assert actual[metric] == pytest.approx(np.mean(expected), abs=2 / len(test))


def test_a_share_keeps_the_sizes_of_the_classes() -> None:
    targets = torch.tensor([0] * 40 + [1] * 15 + [2])
    features = Features(torch.zeros(56, 1), targets, torch.arange(56))
    drawn = [features.draw_share(0.1, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert {tuple(one.targets.bincount().tolist()) for one in drawn} == {(4, 2, 1)}
    assert len(torch.cat([one.indices for one in drawn]).unique()) > 40, "other images each time"


def test_constant_features_rare_and_unseen_classes() -> None:
    features = torch.cat([torch.eye(4).repeat(10, 1), torch.full((40, 1), 5.0)], dim=1)
    targets = torch.arange(4).repeat(10) * 100
    train = Features(features, targets, torch.arange(40))
    test = Features(features[:5], torch.tensor([0, 100, 200, 300, 900]), torch.arange(5))
    got = Linear(few_labels=[10])(train, test)
    assert got["linear_top1"] == got["linear_10_labels_top1"] == pytest.approx(0.8)
    with pytest.raises(UserError, match=r"few_labels: \[11\]: class 0 has 10 training images"):
        Linear(few_labels=[5, 11])(train, test)


def test_one_feature_may_be_far_larger_than_the_others(digits: tuple[Features, Features]) -> None:
    noise = 1e6 * torch.randn(1797, 1, generator=torch.Generator().manual_seed(0))
    train, test = (
        replace(part, features=torch.cat([1e-3 * part.features, noise[part.indices]], dim=1))
        for part in digits
    )
    got = Linear(weight_decay=[1e-2])(train, test)["linear_top1"]
    assert got == pytest.approx(_sklearn(train, test, 1e-2), abs=2 / len(test))


def test_labels_are_needed() -> None:
    blank = Features(torch.zeros(3, 2), torch.full((3,), -1), torch.arange(3))
    with pytest.raises(UserError, match="linear probe, training set"):
        Linear()(blank, blank)
    assert EVALUATIONS["linear"] is Linear
