"""Features of a frozen backbone, and nearest neighbors against scikit-learn and plain loops."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from selftask.batch import Batch
from selftask.config.schema import Component, EvalConfig
from selftask.errors import UserError
from selftask.evaluate import chunks, knn, nearest
from selftask.evaluate import features as features_module
from selftask.evaluate.features import Features, extract_features
from selftask.evaluate.knn import KNN
from selftask.evaluate.online import evaluated_model, flat_scores, over_seeds, run_evaluations
from selftask.logs import DETAIL
from selftask.models.build import build_backbone
from selftask.models.feature_queue import class_votes
from selftask.models.features.extract import pooled
from selftask.registry import EVALUATIONS


def _set(num: int, seed: int, *, classes: int = 5, dim: int = 8) -> Features:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (num,), generator=generator)
    features = torch.eye(classes, dim)[targets] + torch.randn(num, dim, generator=generator) * 0.7
    return Features(features, targets, torch.arange(num))


def _batch(images: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> Batch:
    return Batch(views={"eval": [images]}, labels=labels, index=index, key=index)


def _batches(num: int) -> list[Batch]:
    return [
        _batch(
            torch.full((2, 3, 4, 4), float(i)),
            torch.tensor([i, i + 1]),
            torch.tensor([2 * i, 2 * i + 1]),
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("layers", [[], [-1]])
def test_features_are_means_over_mirrored_and_resized_images(layers: list[int]) -> None:
    backbone = build_backbone(Component(name="small_resnet", args={"width": 4})).eval()
    images = torch.randn(2, 3, 32, 32)
    batch = _batch(images, torch.tensor([0, 1]), torch.tensor([0, 1]))
    small = F.interpolate(images, size=(24, 24), mode="bilinear", antialias=True)
    views = [images, images.flip(3), small, small.flip(3)]
    with torch.no_grad():  # the last layer's mean is the output of this network
        expected = sum(backbone(view) for view in views) / 4
    config = EvalConfig(flip=True, scales=[1.0, 0.75], layers=layers)
    got = extract_features(evaluated_model(backbone, config), [batch], device="cpu")
    torch.testing.assert_close(got.features, expected)
    assert evaluated_model(backbone, EvalConfig()) is backbone


def test_a_transformer_sees_sizes_that_divide_into_patches() -> None:
    args = {"img_size": 32, "patch_size": 8, "depth": 1}
    backbone = build_backbone(Component(name="vit_tiny", args=args))
    images, index = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    model = evaluated_model(backbone, EvalConfig(scales=[1.0, 0.7]))  # 22.4 pixels: 24
    features = extract_features(model, [_batch(images, index, index)], device="cpu").features
    small = F.interpolate(images, size=(24, 24), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = (backbone.eval()(images) + pooled(backbone, small)) / 2
    torch.testing.assert_close(features, expected)
    with pytest.raises(UserError, match=r"eval.transforms gives images of 24x24 pixels"):
        extract_features(model, [_batch(small, index, index)], device="cpu")


def test_extraction_leaves_nothing_behind() -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Dropout(0.5), nn.Linear(48, 4))
    backbone[2].eval()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    state = torch.get_rng_state()

    def drawing():
        for batch in _batches(3):
            torch.rand(1)  # as a DataLoader does
            yield batch

    features = extract_features(backbone, drawing(), device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in backbone.state_dict().items())
    assert [module.training for module in backbone] == [True, True, False, True]
    assert features.features.shape == (6, 4) and features.features.dtype == torch.float32
    assert not features.features.requires_grad and not features.features.is_inference()
    assert features.targets.tolist() == [0, 1, 1, 2, 2, 3]
    assert features.indices.tolist() == list(range(6))
    with torch.no_grad():
        expected = backbone.eval()(torch.full((1, 3, 4, 4), 2.0))
    assert torch.allclose(features.features[5:], expected)


def test_modes_return_after_an_exception() -> None:
    backbone = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        extract_features(backbone, _batches(1), device="cpu")
    assert backbone.training


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e20, 1e38])
def test_features_without_a_finite_norm_are_an_error(value: float) -> None:
    """Normalized in float32, rows of 1e20 would be 0, and the first k images the neighbors."""
    broken = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    nn.init.constant_(broken[1].bias, value)
    with pytest.raises(UserError, match="6 of 6 images are not finite"):
        extract_features(broken, _batches(3), device="cpu")
    with pytest.raises(UserError, match="no images"):
        extract_features(broken, [], device="cpu")


@pytest.mark.parametrize("blocks", [(512, 32_768), (7, 13), (64, 5)])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_equals_scikit_learn(
    blocks: tuple[int, int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn, "QUERIES", blocks[0])
    monkeypatch.setattr(nearest, "_BLOCK", blocks[1])
    products, sizes = nearest._products, []
    spy = lambda rows, bank: sizes.append((len(rows), len(bank))) or products(rows, bank)  # noqa: E731
    monkeypatch.setattr(nearest, "_products", spy)
    train, test = _set(150, 0), _set(60, 1)
    got = KNN(k=[20, 5, 1], temperature=temperature)(train, test)
    assert all(rows <= blocks[0] and bank <= blocks[1] for rows, bank in sizes), "low memory"
    assert sum(rows * bank for rows, bank in sizes) == 60 * 150
    for k, key in [(20, "knn_top1"), (5, "knn_top1_k5"), (1, "knn_top1_k1")]:
        reference = KNeighborsClassifier(
            k, metric="cosine", weights=lambda d: np.exp((1 - d) / temperature)
        )
        reference.fit(train.features.double().numpy(), train.targets.numpy())
        expected = reference.score(test.features.double().numpy(), test.targets.numpy())
        assert got[key] == pytest.approx(expected)


@pytest.mark.parametrize("blocks", [(512, 32_768), (7, 13)])
def test_leave_one_out_is_a_loop_over_sets_without_one(
    blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn, "QUERIES", blocks[0])
    monkeypatch.setattr(nearest, "_BLOCK", blocks[1])
    data = _set(40, 2)
    hits = 0.0
    for i in range(40):
        rest = torch.tensor([j for j in range(40) if j != i])
        hits += KNN(k=[5])(data[rest], data[torch.tensor([i])])["knn_top1"]
    assert KNN(k=[5])(data, data)["knn_top1"] == pytest.approx(hits / 40)
    copy = Features(data.features, data.targets, data.indices)
    assert KNN(k=[1])(data, copy)["knn_top1"] == 1.0  # there each finds itself


def test_classes_that_are_absent() -> None:
    train = Features(torch.eye(3), torch.tensor([0, 7, 7]), torch.arange(3))
    test = Features(torch.eye(3)[:2], torch.tensor([0, 9]), torch.arange(2))
    got = KNN(k=[3], temperature=0.01)(train, test)  # exp(100) overflows in float32
    assert got == {"knn_top1": 0.5}


def test_the_memory_of_votes_does_not_grow_with_the_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []

    def votes(
        cosine: torch.Tensor, labels: torch.Tensor, classes: int, *more: float
    ) -> torch.Tensor:
        counts.append(classes)
        return class_votes(cosine, labels, classes, *more)

    monkeypatch.setattr(knn, "class_votes", votes)
    data = Features(torch.eye(3), torch.tensor([0, 10**6, 5]), torch.arange(3))
    test = Features(torch.eye(3), torch.tensor([0, 10**6, 4]), torch.arange(3))
    assert KNN(k=[2])(data, test) == {"knn_top1": pytest.approx(2 / 3)}
    assert counts == [3]


def test_knn_neighbors_are_of_the_test_classes() -> None:
    train, test = _set(150, 0), _set(60, 1)
    test = test[torch.isin(test.targets, torch.tensor([1, 3]))]
    known = torch.isin(train.targets, torch.tensor([1, 3]))
    reference = KNeighborsClassifier(5, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    reference.fit(train.features.double().numpy()[known], train.targets.numpy()[known])
    expected = reference.score(test.features.double().numpy(), test.targets.numpy())
    got = KNN(k=[5], only_test_classes=True)(train, test)
    assert got["knn_top1"] == pytest.approx(expected)
    assert got["knn_top1"] > KNN(k=[5])(train, test)["knn_top1"]
    alone = KNN(k=[5], only_test_classes=True)(train, train)
    assert alone == KNN(k=[5])(train, train), "no image is its own neighbor"
    with pytest.raises(UserError, match=f"there are {int(known.sum())} images to choose from"):
        KNN(k=[100], only_test_classes=True)(train, test)


def test_more_neighbors_than_there_are_is_refused() -> None:
    data = _set(10, 0)
    with pytest.raises(UserError, match="k: 11 neighbors are asked for, and there are 10 images"):
        KNN(k=[5, 11])(data, _set(5, 1))
    with pytest.raises(UserError, match="use at most 9"):
        KNN(k=[10])(data, data)


def test_labels_are_needed() -> None:
    train = _set(10, 0)
    blank = Features(train.features, torch.full((10,), -1), train.indices)
    with pytest.raises(UserError, match="test set: 10 of 10 images have no label"):
        KNN()(train, blank)
    hashed = Features(train.features, train.targets + 10**12, train.indices)
    with pytest.raises(UserError, match=r"test set: the label 1\d{12} is no class number"):
        KNN()(train, hashed)


def test_is_registered_with_its_fields() -> None:
    assert EVALUATIONS["knn"] is KNN
    assert set(KNN(k=[3, 4])(_set(30, 0), _set(10, 1))) == {"knn_top1", "knn_top1_k4"}


def test_results_of_several_evaluations_are_merged() -> None:
    train, test = _set(60, 1), _set(30, 2)
    near, far = (Component(name="knn", args={"k": [k]}) for k in (3, 9))
    linear = Component(name="linear", args={})
    actual = run_evaluations({"knn": near, "linear": linear}, train, test)
    assert actual["knn_top1"] == KNN(k=[3])(train, test)["knn_top1"]
    assert actual == {
        **run_evaluations({"knn": near}, train, test),
        **run_evaluations({"linear": linear}, train, test),
    }
    with pytest.raises(UserError, match=r"eval\.evaluations\.far: knn_top1 is the result of"):
        run_evaluations({"knn": near, "far": far}, train, test)


def test_results_of_an_evaluation_of_ones_own() -> None:
    """Nested ones and those of NumPy and torch become floats; what is no number is refused."""
    metrics = {"n": {"a": torch.tensor(1.0), "b": {"c": 2}}, "d": np.float32(0.5)}
    flat = flat_scores(metrics, "eval.evaluations.mine")
    assert flat == {"n/a": 1.0, "n/b/c": 2.0, "d": 0.5}
    assert {type(value) for value in flat.values()} == {float}
    with pytest.raises(UserError, match=r"mine: n/b is \[1, 2\]; a number is expected"):
        flat_scores({"n": {"b": [1, 2]}}, "eval.evaluations.mine")
    with pytest.raises(UserError, match=r"mine gives 0\.5; metrics by name"):
        flat_scores(0.5, "eval.evaluations.mine")
    with pytest.raises(UserError, match=r"mine: loss is a column of training; give the metric an"):
        flat_scores({"loss": 0.5}, "eval.evaluations.mine")


def test_an_evaluation_that_takes_other_arguments_is_named() -> None:
    def evaluation(features: object, labels: object, more: object) -> dict[str, float]:
        return {}

    with pytest.raises(UserError, match=r"eval.evaluations.mine: object has no method __call__"):
        over_seeds(object(), (None, None), "eval.evaluations.mine")
    match = r"test_features_knn.py:\d+: eval.evaluations.mine is called with \(train, test\), and t"
    with pytest.raises(UserError, match=match):
        over_seeds(evaluation, (None, None), "eval.evaluations.mine")


def test_a_long_pass_logs_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 1000, 2))
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    lines: list[str] = []
    logger = SimpleNamespace(info=lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(features_module, "time", clock)
    monkeypatch.setattr(features_module, "log", logger)
    monkeypatch.setattr(features_module, "_LOG_EVERY_S", 16.0)
    batches = [_batch(torch.zeros(10), torch.zeros(10), torch.arange(10))] * 20  # 2 s each
    assert list(features_module.log_speed(batches)) == batches
    assert lines == [
        "features: 5 images/s, eta 0:00:24",
        "features: 5 images/s, eta 0:00:08",
    ]
    monkeypatch.setattr(features_module, "world_size", lambda: 2)
    lines.clear()
    assert list(features_module.log_speed(batches)) == batches
    assert lines[0] == "features: 10 images/s, eta 0:00:24", "of both ranks"


def test_the_time_of_a_pass_and_of_its_computation_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three batches of two images: 3 s to read one, 2 s to compute it."""
    now = [100.0]

    def slowly():
        for batch in _batches(3):
            now[0] += 3
            yield batch

    class Slow(nn.Flatten):
        def forward(self, images):
            now[0] += 2
            return super().forward(images)

    monkeypatch.setattr(features_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level(DETAIL, "selftask")
    monkeypatch.setattr(logging.getLogger("selftask"), "propagate", True)
    extract_features(Slow(), slowly(), device="cpu")
    expected = "features: 6 images in 15.0 s, of which the backbone computed 6.0 s"
    assert [record.getMessage() for record in caplog.records] == [expected]


class Full:
    """A call that runs out of memory with more than ``most`` rows."""

    def __init__(self, call, most: int) -> None:
        self.call, self.most, self.rows = call, most, []

    def __call__(self, first, *more):
        self.rows.append(len(first))
        if len(first) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.call(first, *more)


def test_half_the_rows_if_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(2, 11, 3, 4, 4, generator=draws)
    number = torch.arange(11)
    batches = [_batch(x, number, number) for x in images]
    whole = extract_features(backbone, batches, device="cpu")
    backbone.forward = full = Full(backbone.forward, 3)
    emptied: list[torch.device] = []
    monkeypatch.setattr(chunks, "empty_cache", emptied.append)
    parts = extract_features(backbone, batches, device="cpu")
    assert emptied == [torch.device("cpu")] * 2, "before each of the two retries"
    assert full.rows == [11, 5, 2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 1], "what fits is kept"
    torch.testing.assert_close(parts.features, whole.features)
    assert torch.equal(parts.indices, whole.indices)

    full.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        extract_features(backbone, batches, device="cpu")

    train, test = _set(60, 1), _set(30, 2)
    expected = [KNN(k=[5])(train, test), KNN(k=[5])(train, train)]  # the second leaves one out
    largest = Full(nearest._largest, 7)
    monkeypatch.setattr(nearest, "_largest", largest)
    assert [KNN(k=[5])(train, test), KNN(k=[5])(train, train)] == expected
    assert largest.rows[:4] == [30, 15, 7, 7]
