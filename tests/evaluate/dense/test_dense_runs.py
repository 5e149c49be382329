"""Segmentation and correspondence during a run, and of its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from dense_data import write_scenes
from ranks import run_ranks
from selftask.cli.main import main
from selftask.data.loading.open_data import open_data
from selftask.distributed.world import World
from selftask.evaluate.online import evaluate_task
from selftask.task import Task
from selftask.task.loop import train_loop


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scenes")
    write_scenes(root / "train", 6)
    write_scenes(root / "val", 3, first=6)
    return root


def words(folder: Path, out: str, *more: str) -> list[str]:
    return [*tiny.overrides("simclr", folder, out, "train.epochs=2"), *more]


def test_a_run_measures_and_is_not_changed(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No labels and no `data.val` are needed; the weights are those without evaluations."""
    segmentation = (
        f"{{data: {scenes}/train, val: {scenes}/val, size: 32, layer: 0, steps: 20, images: 2}}"
    )
    evaluations = (
        f"eval.evaluations={{segmentation: {segmentation}, "
        "correspondence: {size: 32, layer: 0, images: 6}}"
    )
    best = "train.keep_best.metric=segmentation_knn_miou"
    more = [evaluations, "eval.every=1 epochs", best]
    assert main(["train", "simclr/digits", *words(tmp_path, "run", *more)]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "segmentation_knn_miou" in row]
    assert [row["step"] for row in rows] == [0, 5, 10]
    for row in rows:
        assert row["segmentation_linear_accuracy"] > 0.4
        assert 0 < row["correspondence_pck_0.1"] <= 1
        assert row["eval_s"] > 0 and "knn_top1" not in row
    assert main(["train", "simclr/digits", *words(tmp_path, "plain")]) == 0
    measured, plain = (
        torch.load(tmp_path / out / "export/backbone.pt", weights_only=True)
        for out in ("run", "plain")
    )
    assert measured.keys() == plain.keys()
    assert all(torch.equal(measured[name], plain[name]) for name in plain)
    capsys.readouterr()
    options = ["size=32", "layer=0", "steps=20", "images=2"]
    data = [f"data={scenes}/train", f"data.val={scenes}/val"]
    assert main(["eval", "segmentation", f"{tmp_path}/run@10", *data, *options]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    for head in ("knn", "linear"):
        name = f"segmentation_{head}_miou"
        assert again[name] == pytest.approx(rows[-1][name], rel=1e-6)
    assert main(["eval", "suite", str(tmp_path / "run"), "checkpoints=last"]) == 0
    table = capsys.readouterr().out
    assert "segmentation_knn_miou" in table and f"{rows[-1]['segmentation_knn_miou']:.4f}" in table


def train_on_ranks(rank: int, scenes: Path, folder: Path) -> None:
    options = f"data: {scenes}/train, val: {scenes}/val, size: 32, layer: 0, steps: 20"
    dense = f"{{segmentation: {{{options}}}, correspondence: {{size: 32, layer: 0, images: 9}}}}"
    more = (f"eval.evaluations={dense}", "train.max_steps=3")
    config = tiny.config("simclr", folder, "ranks", *more)
    task = Task(config, sources=open_data(config.data))
    task.world = World(rank, 2, rank, 2)
    task.evaluate = evaluate_task
    train_loop(task)


def test_figures_of_two_ranks_are_those_of_one_on_the_export(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tiny.digits_file(tmp_path)
    run_ranks(train_on_ranks, 2, scenes, tmp_path)
    measured = [r for r in tiny.rows(tmp_path / "ranks") if "segmentation_knn_miou" in r][-1]
    folders = [f"data={scenes}/train", f"data.val={scenes}/val", "steps=20"]
    asked = {"segmentation": folders, "correspondence": [f"data={images}", "images=9"]}
    for name, words in asked.items():
        capsys.readouterr()
        model = f"{tmp_path}/ranks/export/backbone.pt"
        assert main(["eval", name, model, "size=32", "layer=0", *words]) == 0
        row = json.loads(capsys.readouterr().out.splitlines()[-1])
        columns = [key for key in measured if key.startswith(name)]
        assert len(columns) >= 6
        assert {key: measured[key] for key in columns} == pytest.approx(
            {key: row[key] for key in columns}, rel=1e-6
        )


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ("{segmentation: {}}", "segmentation.data: a folder with images and masks is expected"),
        ("{segmentation: {data: SCENES, val: SCENES}}", "data: there is no folder 'images' in"),
        ("{segmentation: {data: s3://a/b, val: SCENES/val}}", "is an address; a local folder"),
        ("{segmentation: {data: SCENES/val, val: SCENES/val, lr: []}}", "lr=[]: one or more"),
        ("{correspondence: {thresholds: []}}", "thresholds=[]: one or more"),
    ],
)
def test_mistakes_are_found_before_the_run(
    evaluation: str,
    message: str,
    scenes: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluation = evaluation.replace("SCENES", str(scenes))
    more = words(tmp_path, "run", f"eval.evaluations={evaluation}")
    assert main(["train", "simclr/digits", *more]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed
    assert not (tmp_path / "run").exists()
