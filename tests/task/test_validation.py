"""Test validation loss, several validation sets, and ``selftask test``."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from validated import LABELED, train

import tiny
from selftask.cli.main import main
from selftask.errors import ConfigError
from selftask.evaluate.online import evaluate_task
from selftask.logs import read_metrics
from selftask.registry import METHODS
from selftask.task import Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("validation")


def test_evaluations_that_draw_random_numbers_do_not_change_the_run(folder: Path) -> None:
    def drawing(task: Task) -> dict[str, float]:
        return {"knn_top1": random.random() * np.random.random() * float(torch.rand(()))}

    def still(task: Task) -> dict[str, float]:
        return {"knn_top1": 0.5}

    words = ("train.max_steps=2", "eval.every='1 steps'", "eval.evaluations={knn: {k: [3]}}")
    runs = [train("simclr", folder, f.__name__, *words, evaluate=f) for f in (drawing, still)]
    own = ("config", "metrics_bytes", "history")
    assert tiny.differences(*(tiny.last_state(task.out, own) for task in runs)) == []


def beside(method: str, folder: Path) -> None:
    """A run with ``eval.loss`` is the same as without, with figures of its own."""
    every = ("train.max_steps=3", "eval.every='2 steps'", "eval.evaluations={}")
    with_loss = train(method, folder, f"{method}_loss", *every, "eval.loss=true")
    without = train(method, folder, f"{method}_plain", *every)
    rows = tiny.rows(with_loss.out)
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert len(losses) == 3  # after 0, 2 and 3 steps
    assert np.isfinite(losses).all()
    own = ("config", "metrics_bytes", "history")
    states = [tiny.last_state(task.out, own) for task in (with_loss, without)]
    assert tiny.differences(*states) == []
    kept = [row for row in rows if "val_loss" not in row]
    assert kept == tiny.rows(without.out)


@pytest.mark.parametrize("method", ["byol", "swav"])
def test_validation_loss_moves_no_state(method: str, folder: Path) -> None:
    beside(method, folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({*METHODS.names()} - {"byol", "swav"}))
def test_validation_loss_of_every_method(method: str, folder: Path) -> None:
    if "index" in METHODS.declared(method, "requires", ()):
        with pytest.raises(ConfigError, match="remembers each training image"):
            train(method, folder, method, "eval.loss=true")
    else:
        beside(method, folder)


def test_validation_loss_is_that_of_the_formula(folder: Path) -> None:
    words = ("eval.loss=true", "train.max_steps=3", "eval.evaluations={}")
    task = train("supervised", folder, "formula", *words, "train.precision=bfloat16")
    losses, indices, modes = [], [], []
    network = task.base_model.eval()
    for batch in task.data_module.val_batches():
        with torch.autocast("cpu", torch.bfloat16):
            scores = network(*batch.all_views)
        losses.append(F.cross_entropy(scores.double(), batch.labels))
        indices += batch.index.tolist()
    assert indices == list(range(32))  # two batches of 16; the last 8 of 40 images are left out
    expected = pytest.approx(float(torch.stack(losses).mean().detach()), rel=1e-5)
    assert tiny.rows(task.out)[-1]["val_loss"] == expected
    hook = lambda net, _, out: modes.append((net.training, out.requires_grad, out.dtype))  # noqa: E731
    network.train().register_forward_hook(hook)
    network.register_forward_hook(lambda *_: task.log("of validation", 1.0))
    assert evaluate_task(task)["val_loss"] == expected and not task.scalars
    assert modes == [(False, False, torch.bfloat16)] * 2 and network.training
    task.close()


def test_a_trained_classifier_is_scored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ema = "hooks.ema={decay: 0.5}"
    run = train("supervised", folder, "scored", LABELED, "eval.evaluations={}", ema).out
    last = [row for row in tiny.rows(run) if "test_accuracy_top_1" in row][-1]
    before = sorted(path.name for path in run.rglob("*"))

    def printed_row(*words: str) -> dict[str, float]:
        capsys.readouterr()
        assert main(["test", str(run), *words]) == 0
        row: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return row

    row = printed_row()
    assert row["accuracy_top_1"] == pytest.approx(last["test_accuracy_top_1"])
    averaged = printed_row("weights=ema")
    assert averaged["accuracy_top_1"] == pytest.approx(last["ema_test_accuracy_top_1"])
    assert averaged["loss"] == pytest.approx(last["ema_test_loss"], rel=1e-6)
    assert averaged["loss"] != row["loss"]

    other = tiny.digits_file(folder, "other.npz", 500, 530)
    task = tiny.task("supervised", folder, "unused", f"data.val={other}")
    task.prepare()
    task.base_model.load_state_dict(tiny.last_state(run)["model"])
    network = task.base_model.eval()
    batches = list(task.data_module.test_batches())
    scores = torch.cat([network(*batch.all_views) for batch in batches]).double()
    labels = torch.cat([batch.labels for batch in batches])
    task.close()
    table = folder / "predictions.csv"
    row = printed_row(f"data={other}", f"predictions={table}")
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["label"]) for line in lines] == labels.tolist()
    assert [int(line["predicted"]) for line in lines] == scores.argmax(dim=1).tolist()
    odds = [float(line["probability"]) for line in lines]
    assert odds == pytest.approx(scores.softmax(dim=1).amax(dim=1).tolist(), rel=1e-5)
    assert [line["path"] for line in lines] == [f"{other}[{number}]" for number in range(30)]
    assert row["loss"] == pytest.approx(float(F.cross_entropy(scores, labels).detach()), rel=1e-5)
    right = float((scores.argmax(dim=1) == labels).double().mean())
    assert row["accuracy_top_1"] == pytest.approx(right)
    assert sorted(path.name for path in run.rglob("*")) == before


def test_predictions_need_class_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train("simclr", folder, "no_scores", "train.max_steps=1", "eval.evaluations={}").out
    assert main(["test", str(run), f"predictions={folder / 'none.csv'}"]) == 2
    assert "simclr gives no class scores" in capsys.readouterr().err
    assert {main(["test", str(run), w]) for w in ("predictons=x", "optimizer.lr=1")} == {2}
    assert not (folder / "none.csv").exists()


def test_several_validation_sets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (tiny.digits_file(folder, f"{a}.npz", a, a + 40) for a in (500, 600))
    half = f"{{name: array, path: {second}, subset: 20}}"
    sets = (
        f"data.val_sets={{first: {first}, second: {{name: array, path: {second}}}, half: {half}}}"
    )
    knn = ("train.max_steps=1", "eval={loss: true, evaluations: {knn: {k: [3]}}}")
    run = train("simclr", folder, "sets", sets, *knn)
    row = tiny.rows(run.out)[-1]
    alone = train("simclr", folder, "alone", *knn, f"data.val={second}")
    expected = tiny.rows(alone.out)[-1]
    for key in ("knn_top1", "val_loss"):
        assert row[f"second/{key}"] == expected[key]
    assert len({row[key] for key in ("val_loss", "first/val_loss", "second/val_loss")}) == 3
    (trained,) = [row for row in tiny.rows(run.out) if "loss" in row]
    assert not [key for key in trained if key.endswith(("knn_top1", "val_loss"))]
    measured = read_metrics(run.out / "metrics.jsonl")[-1]
    assert measured["eval_s"] > 0 and measured["eval_images_per_s"] > 0

    capsys.readouterr()
    assert main(["eval", "knn", str(run.out), "k=[3]", "train.device=cpu"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in ("knn_top1", "first/knn_top1", "second/knn_top1"):
        assert printed[key] == pytest.approx(row[key], abs=1e-8)
    assert printed["second/test_images"] == 40 and printed["half/test_images"] == 20
    second.unlink()  # the features of data= need no validation set
    assert main(["features", str(run.out), f"out={folder / 'features'}", "train.device=cpu"]) == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{a: no/such/folder}", "no/such/folder"),
        ("{a: {name: foldr}}", "no source named 'foldr'; did you mean 'folder'?"),
        ("{a/b: digits}", "the name 'a/b' may have letters, digits and ._- only"),
        ("{a: {name: digits, splt: val}}", "unknown key 'data.val_sets.a.splt'"),
    ],
)
def test_wrong_validation_sets(
    value: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny.overrides("simclr", folder, "wrong", f"data.val_sets={value}")
    assert main(["train", "simclr/digits", *words]) == 2
    assert message in capsys.readouterr().err
