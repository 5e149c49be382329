"""Top-k accuracy against scikit-learn, Classy's contract, and ranks with unequal shares."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from selftask.classy import ClassyMeter
from selftask.config.config_class import config_class
from selftask.errors import UserError
from selftask.meters.accuracy import Accuracy
from selftask.meters.mean_average_precision import MeanAveragePrecision
from selftask.registry import METERS

SHARES = [[7, 5, 1], []]  # batch sizes of two ranks: unequal ones, and none at all


def _scores(num: int = 13, classes: int = 6) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return (
        torch.randn(num, classes, generator=rng),
        torch.randint(classes, (num,), generator=rng),
    )


def _expected(scores: Tensor, target: Tensor, topk: list[int]) -> dict[str, float]:
    from sklearn.metrics import top_k_accuracy_score  # here: ranks need not wait for it

    labels = np.arange(scores.shape[1])
    return {
        f"top_{k}": float(top_k_accuracy_score(target.numpy(), scores.numpy(), k=k, labels=labels))
        for k in topk
    }


def test_value_is_that_of_sklearn_however_the_images_come() -> None:
    scores, target = _scores()
    meter = Accuracy(topk=[1, 3, 5])
    for part in torch.arange(13).split([7, 5, 1]):
        meter.update(scores[part], target[part])
    assert meter.value == pytest.approx(_expected(scores, target, [1, 3, 5]))
    meter.sync_state()
    meter.sync_state()  # counts nothing twice
    assert meter.value == pytest.approx(_expected(scores, target, [1, 3, 5]))
    meter.update(scores, target)  # global as of the last time, and local since
    assert meter.value == pytest.approx(_expected(scores, target, [1, 3, 5]))
    meter.reset()
    assert meter.value == {"top_1": 0.0, "top_3": 0.0, "top_5": 0.0}


def test_unlabeled_images_do_not_count() -> None:
    scores, target = _scores()
    known = target.clone()
    target[3:6] = -1
    meter = Accuracy(topk=[2])
    meter.update(scores, target)
    has_label = target >= 0
    assert meter.value == pytest.approx(_expected(scores[has_label], known[has_label], [2]))


def test_ranks_with_unequal_shares_agree_on_the_whole() -> None:
    from sklearn.metrics import average_precision_score

    scores, target = _scores()
    precisions = [average_precision_score(target == c, scores[:, c]) for c in target.unique()]
    expected = {**_expected(scores, target, [1, 3]), "map": float(np.mean(precisions))}
    for value in run_ranks(_on_rank, 2):
        assert value == pytest.approx(expected)


def _on_rank(rank: int) -> dict[str, float]:
    scores, target = _scores()
    meters = [Accuracy(topk=[1, 3]), MeanAveragePrecision()]
    rows = torch.arange(sum(SHARES[rank])) + sum(map(sum, SHARES[:rank]))
    for part in rows.split(SHARES[rank]):
        for meter in meters:
            meter.update(scores[part], target[part])
    for meter in meters:
        meter.sync_state()
    return {name: value for meter in meters for name, value in meter.value.items()}


def test_state_is_plain_and_goes_on_where_it_was() -> None:
    scores, target = _scores()
    whole, half = Accuracy(topk=[1, 3]), Accuracy(topk=[1, 3])
    half.update(scores[:5], target[:5])
    half.sync_state()
    half.update(scores[5:9], target[5:9])
    file = io.BytesIO()
    torch.save(half.get_classy_state(), file)
    file.seek(0)
    rest = Accuracy(topk=[1, 3])
    rest.set_classy_state(torch.load(file, weights_only=True))
    for meter, first in ((whole, 0), (rest, 9)):
        meter.update(scores[first:], target[first:])
    assert rest.value == whole.value
    with pytest.raises(UserError, match=r"topk=\[1\].*topk=\[1, 3\]"):
        Accuracy(topk=[1]).set_classy_state(half.get_classy_state())


def test_it_is_a_classy_meter() -> None:
    meter = Accuracy(topk=[1, 2])
    assert isinstance(meter, ClassyMeter)
    assert meter.name == "accuracy"
    assert repr(meter) == "accuracy_meter(top_1=0.000000,top_2=0.000000)"


@pytest.mark.parametrize(
    ("output", "target", "message"),
    [
        ((4, 3), (4,), r"topk=\[1, 5\]: there are only 3 classes"),
        ((2, 4, 8), (4,), "a method without class scores"),
        ((4, 8), (4, 8), "labels"),
        ((4, 8), (3,), "labels"),
    ],
)
def test_wrong_shapes_are_told(output: Any, target: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Accuracy().update(torch.zeros(output), torch.zeros(target, dtype=torch.long))


def test_impossible_configs_are_told() -> None:
    schema: Any = config_class(METERS, "accuracy")
    for wrong in ([], [0], [1, 1]):
        assert list(schema(topk=wrong).problems({}))
    assert not list(schema().problems({}))


def test_accuracy_ranks_only_the_test_classes() -> None:
    """Scores of other classes are left out before the best ones are taken."""
    scores, _ = _scores()
    scores[:, 0] += 9
    target = torch.tensor([1, 4, 4, 1, 5, 1, 4, 5, 5, 1, 4, 1, -1])
    meter, every = Accuracy(topk=[1, 2], only_test_classes=True), Accuracy(topk=[1, 2])
    for one in (meter, every):
        one.set_test_labels(target.numpy())
        one.update(scores, target)
    known = target >= 0
    few = scores[:, [1, 4, 5]].argsort(dim=1, descending=True)
    best = torch.tensor([1, 4, 5])[few][known] == target[known][:, None]
    expected = {f"top_{k}": best[:, :k].any(dim=1).double().mean().item() for k in (1, 2)}
    assert meter.value == pytest.approx(expected)
    assert every.value["top_1"] == 0 < meter.value["top_1"]
