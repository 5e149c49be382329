"""Files of predictions, and the metrics of ``selftask eval predictions`` against scikit-learn's."""

from __future__ import annotations

import csv
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import Tensor

import tiny
from selftask.cli.main import main
from selftask.config.load import to_yaml
from selftask.errors import UserError
from selftask.evaluate.prediction_metrics import (
    class_table,
    confusion,
    expected_calibration_error,
    metrics,
)
from selftask.evaluate.predictions import Predictions, prediction_file, read_predictions

NAMES = ["ant", "bee", "cat", "dog", "eel", "fox"]


class Images:
    """A source as far as a file of predictions asks it."""

    def path(self, index: int) -> str:
        return f"images/{index}.png"

    def class_names(self) -> list[str]:
        return NAMES


def write(path: Path, scores: Tensor, labels: Tensor) -> Predictions:
    """Write predictions in two batches and read them."""
    index = torch.arange(len(scores))
    with prediction_file(path, Images()) as append:  # type: ignore[arg-type]
        for rows in index.split(23):
            batch: Any = SimpleNamespace(index=rows, labels=labels[rows], output=scores[rows])
            append(batch)
    assert not list(path.parent.glob("*.part"))
    return read_predictions(path)


@pytest.fixture(scope="module")
def given() -> tuple[Tensor, Tensor]:
    """Scores (60, 6) that are often right, and labels, six of them unknown; no image is a fox."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (60,), generator=draws)
    scores = torch.randn(60, 6, generator=draws)
    scores[torch.arange(60), labels] += 1.5
    labels[::10] = -1
    return scores, labels


def test_accuracy_and_precision_are_scikit_learns(
    given: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    scores, labels = given
    row = metrics(write(tmp_path / "all.npz", scores, labels), [1, 2, 5])
    known = labels >= 0
    truth, shown = labels[known].numpy(), scores[known].numpy()
    assert row["images"] == 54
    for k in (1, 2, 5):
        expected = sklearn_metrics.top_k_accuracy_score(truth, shown, k=k, labels=range(6))
        assert row[f"accuracy_top_{k}"] == pytest.approx(expected, abs=1e-12)
    precisions = [
        sklearn_metrics.average_precision_score(truth == c, shown[:, c]) for c in range(5)
    ]
    assert row["mean_average_precision_map"] == pytest.approx(np.mean(precisions), abs=1e-12)


def test_classes_are_scikit_learns(given: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    scores, labels = given
    known = labels >= 0
    truth, chosen = labels[known].numpy(), scores[known].argmax(dim=1).numpy()
    for name in ("all.npz", "best.csv"):
        predictions = write(tmp_path / name, scores, labels)
        expected = sklearn_metrics.confusion_matrix(truth, chosen, labels=range(6))
        assert np.array_equal(confusion(predictions), expected), name
        rows = class_table(predictions)
        precision, recall, f1, images = sklearn_metrics.precision_recall_fscore_support(
            truth, chosen, labels=range(6), zero_division=0
        )
        for row in rows[:5]:
            label = row["label"]
            assert row["images"] == images[label]
            assert row["recall"] == pytest.approx(recall[label])
            assert row["precision"] == pytest.approx(precision[label])
            assert row["f1"] == pytest.approx(f1[label])
        assert (rows[5]["images"], rows[5]["recall"]) == (0, ""), "there is no fox"
    assert [row["name"] for row in class_table(read_predictions(tmp_path / "all.npz"))] == NAMES


def test_the_table_of_many_classes_takes_no_confusion_matrix() -> None:
    labels = np.array([19_999, 5, 5, -1])
    predictions = Predictions([*"abcd"], labels, np.array([19_999, 5, 7, 7]), np.ones(4))
    tracemalloc.start()
    rows = class_table(predictions)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6, "the matrix has 3.2 GB"
    shown = [(row["images"], row["predicted"], row["recall"]) for row in rows]
    assert (shown[5], shown[7], shown[19_999]) == ((2, 1, 0.5), (0, 1, ""), (1, 1, 1.0))


def test_calibration_error_is_that_of_a_loop(given: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    scores, labels = given
    known = labels >= 0
    odds, chosen = scores[known].double().softmax(dim=1).max(dim=1)
    right = chosen == labels[known]
    expected = 0.0
    for number in range(10):  # ]0, 0.1], ]0.1, 0.2], ...
        inside = [i for i, p in enumerate(odds.tolist()) if number / 10 < p <= (number + 1) / 10]
        if inside:
            accuracy = sum(bool(right[i]) for i in inside) / len(inside)
            confidence = sum(float(odds[i]) for i in inside) / len(inside)
            expected += len(inside) / len(odds) * abs(accuracy - confidence)
    for name in ("all.npz", "best.csv"):
        row = metrics(write(tmp_path / name, scores, labels), bins=10)
        assert row["ece"] == pytest.approx(expected, abs=1e-5), name
    assert metrics(read_predictions(tmp_path / "all.npz")) == metrics(
        read_predictions(tmp_path / "all.npz"), bins=15
    ), "as in the paper"
    two_bins = expected_calibration_error(np.array([0.5, 0.6]), np.array([False, True]), 2)
    assert two_bins == pytest.approx(0.5 * 0.5 + 0.5 * 0.4)  # ]0, 0.5] and ]0.5, 1]
    sure = np.ones(4)
    assert expected_calibration_error(sure, np.array([True, True, True, False]), 15) == 0.25


@pytest.mark.parametrize("name", ["all.npz", "best.csv"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_of_a_diverged_network_are_refused(
    value: float, name: str, given: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """The class of the first NaN was taken as the prediction."""
    scores, labels = given[0].clone(), given[1]
    scores[7, 2] = value
    with pytest.raises(UserError, match="scores of 1 of 60 images are not finite"):
        write(tmp_path / name, scores, labels)


def test_several_labels_an_image(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 6, generator=draws)
    labels = torch.randint(-1, 2, (40, 6), generator=draws)
    predictions = write(tmp_path / "all.npz", scores, labels)
    expected = []
    for c in range(6):
        known = labels[:, c] >= 0
        truth, shown = labels[known, c].numpy(), scores[known, c].numpy()
        expected.append(sklearn_metrics.average_precision_score(truth, shown))
    row = metrics(predictions)
    assert set(row) == {"images", "mean_average_precision_map"}
    assert row["mean_average_precision_map"] == pytest.approx(np.mean(expected), abs=1e-12)
    actual = [line["average_precision"] for line in class_table(predictions)]
    assert actual == pytest.approx(expected, abs=1e-12)
    with pytest.raises(UserError, match="several labels each"):
        confusion(predictions)
    with pytest.raises(UserError, match=r"predictions=FILE.npz holds all scores"):
        write(tmp_path / "best.csv", scores, labels)
    assert not (tmp_path / "best.csv").exists()


def test_figures_are_those_of_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 440)}"
    meters = "meters={accuracy: {topk: [1, 5]}, mean_average_precision: {}}"
    short = ("eval.evaluations={}", "train.max_steps=2", meters)
    task = tiny.train("supervised", tmp_path, "run", val, *short)
    (run := task.out).joinpath("config.yaml").write_text(to_yaml(task.config))
    files = [tmp_path / "all.npz", tmp_path / "best.csv"]
    results = []
    for file in files:
        assert main(["test", str(run), f"predictions={file}"]) == 0
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    classes, counts = tmp_path / "classes.csv", tmp_path / "confusion.csv"
    assert main(["eval", "predictions", *map(str, files)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shared = [set(row) & set(test) for row, test in zip(rows, results, strict=True)]
    assert shared[0] == {"accuracy_top_1", "accuracy_top_5", "mean_average_precision_map"}
    assert shared[1] == {"accuracy_top_1"}
    for keys, row, test in zip(shared, rows, results, strict=True):
        assert {key: row[key] for key in keys} == {key: test[key] for key in keys}
    assert rows[0]["ece"] == pytest.approx(rows[1]["ece"], abs=1e-5)

    words = [str(files[0]), f"classes={classes}", f"confusion={counts}"]
    assert main(["eval", "predictions", *words]) == 0
    with classes.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert sum(int(line["images"]) for line in table) == 40
    with counts.open(newline="") as file:
        head, *lines = list(csv.reader(file))
    numbers = np.array([line[1:] for line in lines], dtype=int)
    assert len(head) == len(lines) + 1
    assert numbers.diagonal().sum() / 40 == pytest.approx(rows[0]["accuracy_top_1"])

    np.savez(tmp_path / "unlabeled.npz", images=np.zeros((2, 32, 32), np.uint8))
    assert main(["test", str(run), f"data={tmp_path}/unlabeled.npz"]) == 2
    assert "method.name=supervised needs labels, and these images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "eval predictions needs a FILE"),
        (["bets.csv"], "bets.csv: there is no such file; did you mean 'best.csv'?"),
        (["table.csv"], "table.csv: is not what `selftask test RUN predictions=FILE` writes"),
        (["table.npz"], "table.npz: is not what `selftask test RUN predictions=FILE` writes"),
        (["best.csv", "topk=[1,5]"], "a table has the best class only"),
        (["all.npz", "topk=[7]"], "there are only 6 classes"),
        (["all.npz", "topk=[0]"], "different numbers from 1 on are expected"),
        (["all.npz", "bins=0"], "bins=0: must be at least 1"),
        (["all.npz", "confuson=x.csv"], "there is no 'confuson'; did you mean 'confusion'?"),
        (["all.npz", "best.csv", "classes=x.csv"], "classes= and confusion= take one FILE"),
        (["empty.npz"], "empty.npz: the file is empty"),
        (["unknown.npz"], "no image has a label"),
        (
            ["others.npz"],
            "others.npz: is not what `selftask test RUN predictions=FILE` writes (label",
        ),
    ],
)
def test_bad_files_and_arguments_of_eval_predictions_are_refused(
    words: list[str],
    message: str,
    given: tuple[Tensor, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    scores, labels = given
    write(Path("all.npz"), scores, labels)
    write(Path("best.csv"), scores, labels)
    write(Path("unknown.npz"), scores, torch.full_like(labels, -1))
    np.savez("others.npz", paths=["x"], labels=[6], scores=np.zeros((1, 6), np.float32))
    Path("table.csv").write_text("path,label\nx,1\n")
    Path("table.npz").write_text("no archive")
    Path("empty.npz").touch()
    assert main(["eval", "predictions", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert printed.out == ""
