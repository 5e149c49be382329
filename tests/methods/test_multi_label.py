"""Several labels an image: the loss, the meter, and training from a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score

import tiny
from minitask import TinyBackbone, loss_of
from selftask.config.load import load_config
from selftask.data.loading.open_data import check_data, open_data
from selftask.errors import ConfigError, UserError
from selftask.meters.mean_average_precision import MeanAveragePrecision
from selftask.methods.multilabel import Multilabel, known_cross_entropy
from selftask.task import Task
from selftask.task.loop import train_loop


def made(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draws = np.random.default_rng(seed)
    scores = draws.normal(size=(60, 4)).round(1)  # with ties
    return torch.from_numpy(scores), torch.from_numpy(draws.integers(-1, 2, size=(60, 4)))


def test_loss_of_known_labels() -> None:
    scores, labels = made()
    labels[3] = -1
    losses = []
    for row, row_labels in zip(scores.tolist(), labels.tolist(), strict=True):
        known = [(s, y) for s, y in zip(row, row_labels, strict=True) if y >= 0]
        terms = [math.log1p(math.exp(-s if y else s)) for s, y in known]
        losses.append(sum(terms) / max(len(terms), 1))
    assert float(known_cross_entropy(scores, labels)) == pytest.approx(np.mean(losses), rel=1e-9)
    method = Multilabel(Multilabel.Config(targets=["up", "down", "left", "right"]))
    task: Any = None  # the number of classes is that of the targets
    assert method.build_network(TinyBackbone(), task).head.out_features == 4
    loss = loss_of(method, scores, labels=labels)
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-9)
    even = loss_of(method, torch.zeros(4, 4), labels=labels[:4].clamp(min=0))
    assert method.chance_loss == pytest.approx(even.item())


def test_mean_average_precision_is_that_of_sklearn() -> None:
    scores, labels = made()
    meter = MeanAveragePrecision()
    for part in range(0, 60, 20):
        meter.update(scores[part : part + 20], labels[part : part + 20])
    expected = [
        average_precision_score(labels[known, c], scores[known, c].float())
        for c in range(4)
        if (known := labels[:, c] >= 0).any()
    ]
    assert meter.value["map"] == pytest.approx(np.mean(expected), rel=1e-9)
    other = MeanAveragePrecision()
    other.set_classy_state(meter.get_classy_state())
    meter.sync_state()
    assert other.value == meter.value


def test_mean_average_precision_of_one_label_an_image() -> None:
    scores, _ = made(1)
    classes = torch.arange(60) % 3
    classes[5] = -1
    meter = MeanAveragePrecision()
    meter.update(scores, classes)
    known = classes >= 0
    expected = [average_precision_score(classes[known] == c, scores[known, c]) for c in range(3)]
    assert meter.value["map"] == pytest.approx(np.mean(expected), rel=1e-6)
    with pytest.raises(UserError, match="are expected, not"):
        meter.update(scores, classes[:3])


def table(folder: Path) -> Path:
    """Images that are bright above or below, or both; the first has an unknown label."""
    rows = ["path,up,down"]
    for number in range(32):
        up, down = number % 2, number // 2 % 2
        pixels = np.zeros((32, 32, 3), np.uint8)
        pixels[:16] = 255 * up
        pixels[16:] = 255 * down
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{up},{down if number else -1}")
    (folder / "list.csv").write_text("\n".join(rows) + "\n")
    return folder / "list.csv"


def words(folder: Path, *more: str) -> list[str]:
    data = f"{{name: table, path: {table(folder)}, numbers: [up, down]}}"
    small = [
        word for word in tiny.overrides("multilabel", folder) if word[:5] not in ("data=", "data.")
    ]
    return [
        *[word for word in small if not word.startswith(("data.val", "method="))],
        f"data={data}",
        f"data.val={data}",
        "method.targets=[up,down]",
        "views.main.transforms=[{name: normalize, stats: half}]",
        "train.epochs=8",
        "optimizer.lr=0.02",
        *more,
    ]


def test_training_from_a_table(tmp_path: Path) -> None:
    config = load_config("multilabel/digits", words(tmp_path))
    task = Task(config, sources=open_data(config.data))
    train_loop(task)
    assert task.last_batch.labels.shape[1] == 2
    results = [
        row["test_mean_average_precision_map"]
        for row in tiny.rows(tmp_path / "run")[1:]
        if "test_mean_average_precision_map" in row
    ]
    assert results[-1] > 0.9


def test_accuracy_is_refused(tmp_path: Path) -> None:
    config = load_config("multilabel/digits", words(tmp_path, "meters={accuracy: {topk: [1]}}"))
    task = Task(config, sources=open_data(config.data))
    with pytest.raises(UserError, match=r"meters.accuracy: scores \(B, C\) and labels \(B,\)"):
        train_loop(task)


def test_missing_numbers_are_refused_with_the_data(tmp_path: Path) -> None:
    config = load_config("multilabel/digits", words(tmp_path, "method.targets=[up,left]"))
    message = "method.targets: the data has no numbers 'left'; it has up, down"
    with pytest.raises(ConfigError, match=message):
        check_data(config, open_data(config.data).train)


def test_mixup_is_refused(tmp_path: Path) -> None:
    """Labels that are unknown cannot be mixed."""
    with pytest.raises(UserError, match=r"hooks\.mixup: labels with unknown entries"):
        tiny.train("multilabel", tmp_path, "run", "hooks.mixup={}")
