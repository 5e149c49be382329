"""The hook that logs meters of the training images, beside counts of every batch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from sklearn.metrics import top_k_accuracy_score

import tiny
from selftask.errors import ConfigError
from selftask.hooks.base import function_hook
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

Seen = list[tuple[torch.Tensor, torch.Tensor]]


def train(folder: Path, out: str, *more: str) -> Seen:
    """Seven steps with a row after every third; return scores and labels of each."""
    seen: Seen = []

    def note(task: Task) -> None:
        if task.train:
            batch = task.last_batch
            labels = batch.labels.argmax(dim=1) if batch.labels.ndim == 2 else batch.labels
            seen.append((batch.output.detach().clone(), labels.clone()))

    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 430)}"
    words = ("hooks.train_meters={}", "meters.accuracy={topk: [1, 3]}", val)
    length = ("train.max_steps=7", "train.log_every=3")
    task = tiny.task("supervised", folder, out, *words, *length, *more)
    task.add_hook(function_hook(on_loss_and_meter=note))
    with suppress(Interrupted):
        train_loop(task)
    return seen


def assert_counted(folder: Path, out: str, seen: Seen) -> None:
    """The rows hold the accuracy of all steps since the one before, by scikit-learn."""
    rows = [row for row in tiny.rows(folder / out) if "loss" in row]
    assert [row["step"] for row in rows] == [3, 6, 7]
    for row, first in zip(rows, (0, 3, 6), strict=True):
        window = seen[first : row["step"]]
        scores, labels = (torch.cat(part).numpy() for part in zip(*window, strict=True))
        for k in (1, 3):
            expected = top_k_accuracy_score(labels, scores, k=k, labels=range(10))
            assert row[f"train_accuracy_top_{k}"] == pytest.approx(expected)
    assert len({row["train_accuracy_top_3"] for row in rows}) > 1


def test_values_are_those_of_the_steps_since_the_row_before(tmp_path: Path) -> None:
    """A test phase between the steps counts apart, and a stop between rows changes nothing."""
    seen = train(tmp_path, "whole")
    assert_counted(tmp_path, "whole", seen)
    tested = [row for row in tiny.rows(tmp_path / "whole") if "test_accuracy_top_1" in row]
    assert [row["step"] for row in tested] == [5, 7]
    for stop in ("train.stop_at=2", "train.stop_at=null"):
        train(tmp_path, "parts", stop)
    assert tiny.rows(tmp_path / "parts") == tiny.rows(tmp_path / "whole")
    states = (tiny.last_state(tmp_path / out) for out in ("whole", "parts"))
    assert tiny.differences(*states) == []


def test_of_a_head_and_of_all_classes(tmp_path: Path) -> None:
    """The scores are those of the named head, also for classes that data.val lacks."""
    seen: Seen = []

    def note(task: Task) -> None:
        if task.train:
            seen.append((task.last_batch.output["b"].detach().clone(), task.last_batch.labels))

    few = f"data.val={tiny.digits_file(tmp_path, 'few.npz', 400, 403)}"
    heads = "method.heads={a: [linear], b: [linear]}"
    meters = "meters.accuracy={topk: [1, 3], head: b, only_test_classes: true}"
    words = [few, heads, meters, "hooks.train_meters={}", "train.max_steps=7", "train.log_every=3"]
    task = tiny.task("supervised", tmp_path, "run", *words)
    task.add_hook(function_hook(on_loss_and_meter=note))
    train_loop(task)
    assert len(task.meters[0].classes) <= 3
    assert_counted(tmp_path, "run", seen)


def test_of_mixed_labels_the_largest_share_counts(tmp_path: Path) -> None:
    assert_counted(tmp_path, "mixed", train(tmp_path, "mixed", "hooks.mixup={}"))


def test_without_meters_it_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.train_meters: there are no meters; add"):
        tiny.config("supervised", tmp_path, "run", "hooks.train_meters={}", "meters=null")
