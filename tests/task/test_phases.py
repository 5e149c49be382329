"""Test phases, early stopping, validation loss, ``selftask test``."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tiny
from selftask.checkpoint.kept import Kept
from selftask.cli.main import main
from selftask.config.load import to_yaml
from selftask.errors import ConfigError, UserError
from selftask.evaluate.online import evaluate_task
from selftask.hooks.base import function_hook
from selftask.logs import read_metrics
from selftask.registry import METHODS
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

FIGURES = {2: 0.5, 4: 0.6, 6: 0.61, 8: 0.3}
STOP = (
    "hooks.early_stopping={patience: 2, min_delta: 0.05}",
    "train.epochs=2",
    "eval={every: 2 steps, evaluations: {knn: {k: [3]}}}",
)
LABELED = "meters.accuracy={topk: [1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phases")


def train(method: str, folder: Path, out: str, *more: str, evaluate: Any = evaluate_task) -> Task:
    """A tiny run with 40 images in ``data.val``."""
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"
    task = tiny.task(method, folder, out, val, *tiny.extras("data.val", method), *more)
    task.evaluate = evaluate
    task.out.mkdir(exist_ok=True)
    (task.out / "config.yaml").write_text(to_yaml(task.config))
    try:
        train_loop(task)
    except Interrupted:
        assert task.config.train.stop_at
    return task


def figures(task: Task) -> dict[str, float]:
    """Stands for the evaluation of a task."""
    return {"knn_top1": FIGURES.get(task.steps_done, 0.0)}


def test_early_stopping_ends_the_run_and_resumes_bit_for_bit(folder: Path) -> None:
    whole = train("simclr", folder, "stopped", *STOP, evaluate=figures)
    assert whole.steps_done == 8  # of 10: two evaluations without a gain of 0.05
    assert whole.clock.stopped is not None
    assert "knn_top1 was best at step 4 (0.6)" in whole.clock.stopped
    rows = tiny.rows(whole.out)
    assert [row["step"] for row in rows if "knn_top1" in row] == [0, 2, 4, 6, 8]
    assert (whole.out / "export/backbone.pt").exists()
    for stop in (3, 7):
        train("simclr", folder, "parts", *STOP, f"train.stop_at={stop}", evaluate=figures)
    parts = train("simclr", folder, "parts", *STOP, evaluate=figures)
    assert tiny.rows(parts.out) == rows
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(parts.out)) == []


@pytest.mark.parametrize(("mode", "target", "step"), [("max", 0.61, 6), ("min", 0.55, 2)])
def test_a_run_that_reaches_its_target_ends(
    mode: str, target: float, step: int, folder: Path
) -> None:
    """Also by a gain that would be too small to count."""
    patient = f"{{mode: {mode}, patience: 9, min_delta: 0.05, target: {target}}}"
    words = (f"hooks.early_stopping={patient}", *STOP[1:])
    done = train("simclr", folder, f"target_{mode}", *words, evaluate=figures)
    assert done.steps_done == step
    value = FIGURES[step]
    expected = f"stopped early: knn_top1 was {value:g} at step {step}, target {target:g}"
    assert done.clock.stopped == expected
    again = train("simclr", folder, f"target_{mode}", *words, evaluate=figures)
    assert again.steps_done == step


@pytest.mark.parametrize(
    ("metric", "mode", "step"),
    [
        *(("val_error", "min", 2), ("v2/val_loss", "min", 2), ("knn_top1", "max", 4)),
        *(("feature_uniformity", "min", 2), ("lidar", "max", 4)),
    ],
)
def test_the_name_of_a_metric_tells_its_direction(
    metric: str, mode: str, step: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 0.5, then 0.6, the first is at most 0.55, and the second at least."""
    words = (
        f"hooks.early_stopping={{metric: {metric}, target: 0.55}}",
        f"train.keep_best={{metric: {metric}}}",
        f"hooks.plateau={{metric: {metric}}}",
    )
    values = lambda task: {metric: FIGURES.get(task.steps_done, 0.7)}  # noqa: E731
    out = f"auto_{metric.replace('/', '_')}"
    with caplog.at_level("INFO", logger="selftask"):
        done = train("simclr", folder, out, *words, *STOP[1:], evaluate=values)
    assert done.steps_done == step
    kept = Kept.read(done.out / "checkpoints")
    assert (kept.mode, kept.best) == (mode, ((step, FIGURES[step]),))
    assert done.named_hooks["plateau"].scheduler.mode == mode
    good = "small" if mode == "min" else "large"
    for key in ("hooks.early_stopping", "train.keep_best", "hooks.plateau"):
        message = f"{key}.mode=auto: {mode}, {good} values of {metric} are good"
        assert caplog.messages.count(message) == 1


def test_a_stopped_run_is_finished(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = "hooks.early_stopping={metric: loss, mode: min, min_delta: 1000, patience: 3}"
    words = ["train", "simclr/digits", *tiny.overrides("simclr", folder, "finished", stop)]
    assert main(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("RUN finished: 4 steps")
    assert "stopped early: loss was best at step 1" in last
    assert tiny.status(folder / "finished")["state"] == "finished"
    assert main(words) == 0
    assert "RUN finished already" in capsys.readouterr().out


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


def test_test_phases_every_other_epoch_and_half_an_epoch(folder: Path) -> None:
    words = (LABELED, "eval.evaluations={}", "eval.test_every=2", "train.epochs=4.6")
    words += ("train.checkpoint_every='0.5 epoch'", "train.log_every=3", "hooks.clip_gradients={}")
    whole = train("supervised", folder, "every", *words)
    assert whole.steps_done == 23  # 5 in an epoch
    tests = [row for row in tiny.rows(whole.out) if "test_accuracy_top_1" in row]
    assert [row["epoch"] for row in tests] == [2.0, 4.0, 4.6]
    assert not any("grad_norm" in row for row in tests), "it is of training"
    for stop in (7, 10, 20):
        train("supervised", folder, "every_parts", *words, f"train.stop_at={stop}")
    parts = train("supervised", folder, "every_parts", *words)
    assert tiny.rows(whole.out) == tiny.rows(parts.out)
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(parts.out)) == []


@pytest.mark.parametrize(
    ("start", "tested", "evaluated"),
    [("3 epochs", [4.0, 4.6], [16, 20, 23]), ("7 steps", [2.0, 4.0, 4.6], [8, 12, 16, 20, 23])],
)
def test_nothing_is_evaluated_before_its_start(
    start: str, tested: list[float], evaluated: list[int], folder: Path
) -> None:
    """Test phases every other epoch of five steps, k-NN every four steps, 23 steps in all."""
    words = (LABELED, "eval={every: 4 steps, evaluations: {knn: {k: [3]}}, test_every: 2}")
    words += ("train.epochs=4.6", f"eval.start={start}")
    name = start.replace(" ", "_")
    whole = train("supervised", folder, name, *words)
    rows = tiny.rows(whole.out)
    assert [row["epoch"] for row in rows if "test_accuracy_top_1" in row] == tested
    assert [row["step"] for row in rows if "knn_top1" in row] == evaluated
    train("supervised", folder, f"{name}_parts", *words, "train.stop_at=17")
    parts = train("supervised", folder, f"{name}_parts", *words)
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(parts.out)) == []


def test_phases_have_their_numbers_behind_a_late_start(folder: Path) -> None:
    """Classy's indices of train and test phases, for hooks of Classy."""
    words = (LABELED, "eval.evaluations={}", "train.epochs=5", "eval.start='3 epochs'")
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"
    task = tiny.task("supervised", folder, "numbers", val, *words)
    seen: list[tuple[bool, int, int]] = []
    note = lambda task: seen.append((task.train, task.train_phase_idx, task.eval_phase_idx))  # noqa: E731
    task.add_hook(function_hook(on_phase_start=note))
    train_loop(task)
    trained = [(True, 0, -1), (True, 1, -1), (True, 2, -1), (False, 2, 0)]
    assert seen == [*trained, (True, 3, 0), (False, 3, 1), (True, 4, 1), (False, 4, 2)]


def test_epochs_are_parts_of_one_stream(tmp_path: Path) -> None:
    """85 images, 16 a batch: 5 steps an epoch, from one reader; the last images are left out."""
    data = f"data={tiny.digits_file(tmp_path, '85.npz', 0, 85)}"
    task = tiny.task("simclr", tmp_path, "run", data, "data.num_workers=1", "train.epochs=2")
    iterators, readers, seen, shown = [], [], [], [set(), set()]

    def note(task: Task) -> None:
        batch = task.last_batch
        readers.append(task.data_module.batches._reader)
        seen.append((task.steps_done, task.clock.epoch, batch.number, batch.epoch))
        shown[batch.epoch].update(batch.index.tolist())

    see = {"on_phase_start": lambda task: iterators.append(task.batches), "on_update": note}
    task.add_hook(function_hook(**see))
    train_loop(task)
    assert seen == [(step, step // 5, step, step // 5) for step in range(10)]
    assert all(reader is readers[0] is not None for reader in readers)
    assert [len(indices) for indices in shown] == [80, 80]
    assert len(iterators) == 2, "each phase has its own, which has come to its end"
    assert [next(batches, None) for batches in iterators] == [None, None]


def watched(folder: Path, out: str, *more: str) -> tuple[Task, list[str]]:
    """Train, and list the points of phases with the step at which they come."""
    calls: list[str] = []
    words = (LABELED, "eval.evaluations={}", "train.epochs=2.2", *more)
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}"
    task = tiny.task("supervised", folder, out, val, *words)

    def note(point: str) -> Any:
        def call(task: Task) -> None:
            calls.append(f"{task.phase_type} {point} {task.steps_done}")

        return call

    task.add_hook(function_hook(on_phase_start=note("from"), on_phase_end=note("to")))
    try:
        train_loop(task)
    except Interrupted:
        assert task.config.train.stop_at
    return task, calls


def test_an_epoch_of_two_phases(folder: Path) -> None:
    """Five steps an epoch: phases of two and three; resumed in any of them, bit for bit."""
    words = ("train.phases_per_epoch=2", "train.checkpoint_every='1 step'")
    whole, calls = watched(folder, "halves", *words)
    ends = [2, 5, 7, 10, 11]
    train = [call for call in calls if call.startswith("train")]
    starts = [0, *ends[:-1]]
    expected = [(f"train from {a}", f"train to {b}") for a, b in zip(starts, ends, strict=True)]
    assert train == [call for pair in expected for call in pair]
    assert [call for call in calls if call.startswith("test to")] == [f"test to {e}" for e in ends]
    rows = [row for row in tiny.rows(whole.out) if "test_accuracy_top_1" in row]
    assert [row["epoch"] for row in rows] == [0.4, 1.0, 1.4, 2.0, 2.2]
    for stop in (1, 2, 6, 7, 10):
        watched(folder, "halves_parts", *words, f"train.stop_at={stop}")
    parts, _ = watched(folder, "halves_parts", *words)
    assert tiny.rows(whole.out) == tiny.rows(parts.out)
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(parts.out)) == []

    plain, calls = watched(folder, "epochs", "train.checkpoint_every='1 step'")
    assert [call for call in calls if call.startswith("train to")] == [
        f"train to {end}" for end in (5, 10, 11)
    ]
    states = [tiny.last_state(task.out) for task in (whole, plain)]
    for part in ("model", "method", "optimizer"):
        assert tiny.differences({part: states[0][part]}, {part: states[1][part]}) == []


def test_test_phases_after_so_many_train_phases(folder: Path) -> None:
    words = ("train.phases_per_epoch=2", "eval.test_every=3", "train.step=accumulate")
    task, _ = watched(folder, "thirds", *words, "train.accumulate=2")  # three steps an epoch
    tests = [row["step"] for row in tiny.rows(task.out) if "test_accuracy_top_1" in row]
    assert tests == [4, 7]  # phases of one and two steps; 2.2 epochs are seven steps
    with pytest.raises(UserError, match="phases_per_epoch=6: an epoch has 5 steps, and a phase"):
        watched(folder, "sixths", "train.phases_per_epoch=6")


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
