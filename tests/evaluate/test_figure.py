"""Bootstrap intervals beside SciPy and closed forms; seeds; two runs on the same test images."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import selftask
import tiny
from selftask.checkpoint import rotation
from selftask.cli.main import main
from selftask.cli.model.result_row import layer_table
from selftask.config.load import to_yaml
from selftask.config.schema import Component
from selftask.evaluate.features import Features
from selftask.evaluate.figure import Figure, bootstrap_interval, image_interval
from selftask.evaluate.image_scores import packed_scores, unpacked_scores
from selftask.evaluate.knn import KNN
from selftask.evaluate.linear import Linear
from selftask.evaluate.online import run_evaluations
from selftask.logs import write_json

DRAWS = np.random.default_rng(0)


def test_interval_of_right_and_wrong_is_that_of_the_binomial() -> None:
    """A resampled accuracy times N is binomial: its quantiles are known."""
    hits = DRAWS.random(400) < 0.8
    expected = stats.binom.ppf((0.025, 0.975), 400, hits.mean()) / 400
    actual = bootstrap_interval(hits.astype(float), resamples=200_000)
    assert actual == pytest.approx(expected, abs=1 / 400 + 1e-12)


@pytest.mark.parametrize("num_hits", [0, 1, 9, 10, 50, 90, 91, 99, 100])
def test_interval_of_few_mistakes_is_that_of_scipy(num_hits: int) -> None:
    """A bootstrap over images that are all right has no width."""
    hits = DRAWS.permutation(np.arange(100) < num_hits).astype(float)
    expected = stats.binomtest(num_hits, 100).proportion_ci(method="exact")
    is_exact = not 10 <= num_hits <= 90
    tolerance = 1e-9 if is_exact else 0.04
    assert image_interval(hits) == pytest.approx((expected.low, expected.high), abs=tolerance)


@pytest.mark.parametrize("share", [0.8, 0.97])
def test_interval_contains_the_true_accuracy(share: float) -> None:
    """In 95 % of all test sets of 75 images, which have whole numbers of hits."""
    covered = 0.0
    for num_hits in range(76):
        low, high = image_interval((np.arange(75) < num_hits).astype(float))
        covered += stats.binom.pmf(num_hits, 75, share) * (low <= share <= high)
    assert covered > 0.93


@pytest.mark.parametrize("kinds", [2, 6])
def test_interval_is_that_of_scipy(kinds: int) -> None:
    """Right or wrong, and means over five draws."""
    scores = DRAWS.integers(0, kinds, 300) / (kinds - 1)
    expected = stats.bootstrap(
        (scores,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    actual = bootstrap_interval(scores, resamples=20_000)
    assert actual == pytest.approx((expected.low, expected.high), abs=0.004)


def test_paired_interval_is_that_of_mcnemar_for_many_images() -> None:
    """Wald's interval of a difference of paired shares; that of unpaired ones is wider."""
    one = DRAWS.random(20_000) < 0.7
    other = np.where(DRAWS.random(20_000) < 0.1, ~one, one)
    gained, lost = (one & ~other).mean(), (~one & other).mean()
    half = 1.96 * ((gained + lost - (gained - lost) ** 2) / 20_000) ** 0.5
    actual = bootstrap_interval(one.astype(float) - other, resamples=50_000)
    middle = gained - lost
    assert actual == pytest.approx((middle - half, middle + half), abs=0.03 * half)
    unpaired = 1.96 * ((one.var() + other.var()) / 20_000) ** 0.5
    assert (actual[1] - actual[0]) / 2 < 0.6 * unpaired


def test_many_different_scores_take_little_memory() -> None:
    """As of the mean over 10,000 classes, whose counts took 1.6 GB."""
    scores = np.arange(20_000.0)
    tracemalloc.start()
    actual = bootstrap_interval(scores, resamples=1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    drawn = np.random.default_rng(0).multinomial(20_000, np.full(20_000, 1 / 20_000), 1000)
    expected = np.quantile(drawn @ scores / 20_000, (0.025, 0.975))
    assert actual == pytest.approx(expected, rel=1e-12)


def test_equal_models_do_not_differ() -> None:
    assert bootstrap_interval(np.zeros(50)) == (0.0, 0.0)


def features(count: int, seed: int) -> Features:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=draws)
    x = torch.randn(count, 6, generator=draws) + torch.eye(3, 6)[labels]
    return Features(x, labels, torch.arange(count))


def test_results_are_the_means_of_their_scores() -> None:
    train, test = features(120, 0), features(70, 1)
    results = {**KNN(k=[3, 9])(train, test), **Linear(few_labels=[4], repeats=3)(train, test)}
    assert len(results) == 4
    for value in results.values():
        assert isinstance(value, Figure) and value.scores is not None
        assert value.scores.shape == (70,) and value == pytest.approx(value.scores.mean())
    assert len(np.unique(results["linear_4_labels_top1"].scores)) > 2  # type: ignore[attr-defined]


def test_seeds_are_separate_evaluations() -> None:
    train, test = features(120, 0), features(70, 1)
    args = {"few_labels": [2], "repeats": 1}
    alone = [Linear(seed=seed, **args)(train, test) for seed in (4, 5, 6)]  # type: ignore[arg-type]
    linear = Component(name="linear", args={**args, "seed": 4, "seeds": 3})
    row = run_evaluations({"linear": linear}, train, test)
    values = [float(one["linear_2_labels_top1"]) for one in alone]
    figure = row["linear_2_labels_top1"]
    assert isinstance(figure, Figure) and figure.scores is not None
    assert len(set(values)) > 1 and list(figure.of_seeds) == values
    assert figure == pytest.approx(np.mean(values))
    assert figure.scores.mean() == pytest.approx(np.mean(values))


def test_scores_survive_a_line_of_json() -> None:
    scores = DRAWS.integers(0, 6, 999) / 5
    packed = json.loads(json.dumps(packed_scores(scores)))
    unpacked = unpacked_scores(packed)
    assert unpacked is not None and np.array_equal(unpacked, scores)
    assert len(json.dumps(packed_scores(DRAWS.random(50_000) < 0.7))) < 13_000
    for damage in (
        {"images": 998},
        {"images": 10**12},
        {"numbers": "?"},
        {"values": [0.5]},
        {"values": [float("nan")] * 6},
        {"values": "x"},
    ):
        assert unpacked_scores({**packed, **damage}) is None
    assert unpacked_scores(None) is None


@pytest.mark.parametrize("number", [256, 257, 65_536, 65_537])
def test_any_number_of_distinct_scores_survives(number: int) -> None:
    scores = DRAWS.permutation(number) / number
    unpacked = unpacked_scores(packed_scores(scores))
    assert unpacked is not None and np.array_equal(unpacked, scores)


def test_layers_are_a_table() -> None:
    """In the order of the layers, with intervals where there are any."""
    row = {"knn_top1_layer10": 0.5, "knn_top1_layer10_low": 0.4, "knn_top1_layer10_high": 0.6}
    row |= {"knn_top1_layer2": 0.25, "svm_map_layer2": 0.125, "classes": 10.0}
    assert layer_table(row) == [
        "layer  knn_top1              svm_map",
        "    2  0.250                 0.125",
        "   10  0.500 [0.400, 0.600]",
    ]
    assert layer_table({"knn_top1": 0.5, "knn_top1_layer3": 0.5}) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs and two sets of test images."""
    folder = tmp_path_factory.mktemp("pairs")
    tiny.digits_file(folder, "val.npz", 400, 700)
    tiny.digits_file(folder, "other.npz", 700, 1000)
    for out in ("runs/a", "runs/b"):
        words = ("train.max_steps=2", "train.checkpoint_every=1", "hooks.ema={}")
        task = tiny.train("simclr", folder, out, *words, f"train.seed={len(out)}")
        (task.out / "config.yaml").write_text(to_yaml(task.config))
        write_json(task.out / "status.json", {"state": "finished", "step": 2})
        assert rotation.checkpoints(task.out / "checkpoints")
    return folder


def test_report_compares_only_the_same_test_images(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights do not differ; a damaged classifier does; other images say nothing."""
    runs = [folder / "runs/a", folder / "runs/b"]

    def evaluate(run: Path, val: str, *words: str) -> dict[str, float]:
        command = ["eval", "knn", str(run), f"data={folder}/digits.npz", f"data.val={folder}/{val}"]
        assert main([*command, *words]) == 0
        row: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return row

    def compared() -> list[str]:
        assert main(["report", *map(str, runs), f"out={folder}/both.html"]) == 0
        out = capsys.readouterr().out.splitlines()
        return [line for line in out if "test images" in line]

    first = evaluate(runs[0], "val.npz", "k=[5]")
    assert first["knn_top1_low"] < first["knn_top1"] < first["knn_top1_high"]
    evaluate(runs[1], "other.npz", "k=[5]")
    evaluate(runs[1], "val.npz", "k=[1]")
    assert compared() == []
    second = evaluate(runs[1], "val.npz", "k=[5]")
    (line,) = compared()
    difference = first["knn_top1"] - second["knn_top1"]
    assert f"a {first['knn_top1']:.4g}" in line and "300 test images" in line
    assert f"difference {difference:.4g}" in line or f"difference {-difference:.4g}" in line
    page = (folder / "both.html").read_text()
    assert "Differences on test images" in page
    kept = [json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1]) for run in runs]
    for row, shown in zip(kept, (first, second), strict=True):
        assert row["options"]["k"] == [5] and shown.items() <= row.items()
        weights = selftask.load(runs[kept.index(row)]).backbone.state_dict()
        digest = hashlib.sha256()
        for name, value in weights.items():
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.numpy().tobytes())
        assert row["model_digest"] == digest.hexdigest()
        sets = row["data_digests"]
        stored = row["image_scores"]["knn_top1"]
        assert sets == {"data": stored["train"], "data.val": stored["test"]}
        images = f"data {sets['data'][:8]}, data.val {sets['data.val'][:8]}"
        for text in (images, row["model_digest"][:8], f"{shown['knn_top1']:.4g}", "k=[5]"):
            assert text in page.partition("results-of-eval")[2]
    assert kept[0]["data_digests"] == kept[1]["data_digests"]

    before = compared()
    evaluate(runs[1], "val.npz", "k=[5]", "weights=ema")  # other weights
    evaluate(Path(f"{runs[1]}@1"), "val.npz", "k=[5]")  # an earlier checkpoint
    assert compared() == before

    file = runs[1] / "evaluations.jsonl"
    lines = (runs[0] / "evaluations.jsonl").read_text()
    file.write_text(lines)  # as if the two had the same weights
    assert compared()[0].endswith("interval 0 to 0: no difference shown")
    row = json.loads(lines)
    stored = row["image_scores"]["knn_top1"]
    stored["values"] = [0.0] * len(stored["values"])
    file.write_text(json.dumps(row) + "\n")
    assert compared()[0].endswith("they differ")
