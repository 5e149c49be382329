"""Evaluations and meters that lack labels, class scores or classes say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import last_line, train

import tiny
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.evaluate.online import check_evaluations


@pytest.mark.parametrize("without", ["data", "data.val"])
def test_evaluations_without_labels_are_told(folder: Path, without: str) -> None:
    """Who gives data.val waits for its numbers."""
    val = f"data.val={tiny.digits_file(folder)}"
    knn = "eval.evaluations={knn: {}}"
    assert train(folder, val, f"{without}.labels=null", knn, "train.max_steps=1") == 0
    text = (folder / "run/log.txt").read_text()
    assert f"no knn while training: the images of {without} have no labels" in text
    assert "knn_top1" not in text


def test_no_evaluations_without_validation_images() -> None:
    for more, expected in ([], True), (["data.val=null"], False):
        config = load_config("simclr/digits", more)
        assert config.eval.evaluations
        assert (check_evaluations(config, open_data(config.data)) is not None) == expected


@pytest.mark.parametrize("labelled", [True, False])
def test_meters_without_labelled_images_are_told(tmp_path: Path, labelled: bool) -> None:
    val = [f"data.val={tiny.digits_file(tmp_path)}"] if labelled else []
    words = ["meters.accuracy={topk: [1]}", "train.max_steps=1", *val]
    words = tiny.overrides("supervised", tmp_path, "run", *words)
    assert main(["train", "supervised/digits", *words]) == 0
    text = (tmp_path / "run/log.txt").read_text()
    told = "meters (accuracy) measure nothing: data.val has no labelled images"
    assert (told in text) == (not labelled)
    assert ("test_accuracy_top_1" in tiny.rows(tmp_path / "run")[-1]) == labelled


def test_meters_of_class_scores_need_a_method_that_gives_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"data.val={tiny.digits_file(folder)}"
    assert train(folder, "meters={accuracy: {}}", data) == 2
    assert "method.name=simclr gives none" in last_line(capsys)


def test_more_guesses_than_classes_are_told_before_the_first_epoch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"data.val={tiny.digits_file(folder)}"
    words = tiny.overrides("supervised", folder, "run", "meters.accuracy.topk=[1,11]", data)
    assert main(["train", "supervised/digits", *words]) == 2
    expected = (
        "RUN FAILED at step 0 on rank 0: meters.accuracy.topk=[1, 11]: there are only 10 classes"
    )
    assert last_line(capsys) == expected
