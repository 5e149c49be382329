"""Checkpoints kept beside the newest ones, room on the disk, and ``selftask checkpoints``."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch

import selftask
import tiny
from selftask.checkpoint import rotation, store
from selftask.checkpoint.kept import FILE, Kept
from selftask.checkpoint.writer import CheckpointWriter
from selftask.cli.main import main
from selftask.errors import RunError
from selftask.task import Task

FIGURES = {2: 0.3, 4: 0.7, 5: 0.7, 6: 0.2, 8: 0.7, 10: 0.5}  # what evaluations find after steps
WORDS = (
    "train={epochs: 2, keep_checkpoints: 1, checkpoint_every: 3 steps}",
    "train.keep_best={metric: knn_top1, count: 2}",
    "eval={every: 2 steps, evaluations: {knn: {k: [3]}}}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


def train(folder: Path, out: str, *more: str) -> Task:
    """Ten tiny steps with evaluations whose figures are given."""
    task = tiny.task("simclr", folder, out, *WORDS, *more)
    return tiny.loop_evaluated(task, lambda task: {"knn_top1": FIGURES.get(task.steps_done, 0.0)})


def steps(out: Path) -> list[int]:
    return [rotation.step_of(path) for path in rotation.checkpoints(out / "checkpoints")]


def test_one_every_few_steps_and_one_at_the_end(folder: Path) -> None:
    """Ten or twelve steps, five an epoch, in two attempts; the oldest ones make room."""
    cases: dict[tuple[str, float, int, int], list[int]] = {
        ("3 steps", 2, 9, 6): [10, 9, 6, 3],
        ("3 steps", 2, 2, 6): [10, 9],
        ("1 epoch", 2.4, 9, 5): [12, 10, 5],
    }
    for number, ((every, epochs, keep, end), expected) in enumerate(cases.items()):
        words = f"train={{epochs: {epochs}, checkpoint_every: {every}, keep_checkpoints: {keep}}}"
        for stop in (f"train.stop_at={end}", "train.stop_at=null"):
            out = tiny.train("simclr", folder, f"regular_{number}", words, stop).out
        assert steps(out) == expected
        named = [out / f"checkpoints/step_{step:09d}.pt" for step in reversed(expected)]
        assert sorted((out / "checkpoints").glob("*.pt")) == named
        clocks = [store.load(path)["clock"]["steps_done"] for path in reversed(named)]
        assert clocks == expected


def test_the_best_and_every_nth_stay_through_a_resume(folder: Path) -> None:
    every = "train.keep_every='5 steps'"
    whole = train(folder, "whole", every).out
    assert steps(whole) == [10, 8, 5, 4]  # the newest, two best, and 5 and 10 for good
    for stop in (4, 7):
        train(folder, "parts", every, f"train.stop_at={stop}")
    parts = train(folder, "parts", every).out
    assert steps(parts) == steps(whole)
    kept = [json.loads((out / "checkpoints" / FILE).read_text()) for out in (whole, parts)]
    assert kept[0] == kept[1]
    assert kept[0]["best"] == [[4, 0.7], [8, 0.7]], "of equal values, the earlier is better"
    assert tiny.rows(whole) == tiny.rows(parts)
    assert tiny.differences(tiny.last_state(whole), tiny.last_state(parts)) == []


def test_the_last_evaluation_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the last save; a first value of NaN is not the best one."""
    monkeypatch.setitem(FIGURES, 2, math.nan)
    monkeypatch.setitem(FIGURES, 10, 0.9)
    out = train(folder, "last", "train.keep_best.count=1").out
    assert Kept.read(out / "checkpoints").best == ((10, 0.9),)
    assert steps(out) == [10], "the best one before is removed"


def test_smaller_is_better_and_a_rewound_run_forgets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FIGURES, 8, math.nan)  # neither is best
    monkeypatch.setitem(FIGURES, 10, -math.inf)
    low = "train.keep_best={metric: knn_top1, mode: min, count: 2}"
    out = train(folder, "low", low).out
    assert [step for step, _ in Kept.read(out / "checkpoints").best] == [6, 2]
    second = out / "checkpoints/step_000000002.pt"
    train(folder, "low", low, f"resume={second}", "train.stop_at=3")
    assert [step for step, _ in Kept.read(out / "checkpoints").best] == [2]


def test_the_list_is_written_before_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two leaves a file too many, and not a list without the new best."""
    first, second = (store.save({}, tmp_path, step, keep=2) for step in (1, 2))
    Kept(best=((1, 0.1),), every=(7,)).write(tmp_path)
    assert Kept.read(tmp_path).every == (), "there is no checkpoint of step 7"

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rotation, "rotate", killed)
        with pytest.raises(KeyboardInterrupt):
            Kept(best=((2, 0.9),)).rotate(second, 1)
    assert Kept.read(tmp_path).best == ((2, 0.9),) and first.exists()
    Kept().rotate(second, 1)
    assert not (tmp_path / FILE).exists(), "an empty list leaves no old one"
    assert rotation.checkpoints(tmp_path) == [second]


def test_a_new_list_waits_for_the_write_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise OSError("no room")

    writer = CheckpointWriter(tmp_path, keep=1)
    monkeypatch.setattr(writer, "_write", fails)
    writer.save({}, 1)
    with pytest.raises(RunError, match="step 1 could not be written"):
        writer.keep_now(Kept())


def test_a_metric_that_no_row_has_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="selftask"):
        train(folder, "typo", "train.keep_best.metric=knn_top", "train.epochs=1")
    logged = [text for text in caplog.messages if "keep_best" in text]
    assert len(logged) == 1
    assert "no row has it yet; did you mean 'knn_top1'" in logged[0]


def test_a_metric_of_step_0_is_known(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of training before the first save lack it."""
    with caplog.at_level(logging.WARNING, logger="selftask"):
        train(folder, "late", "train.log_every=1", "train.max_steps=4", "eval.every=4 steps")
    assert [text for text in caplog.messages if "keep_best" in text] == []


def test_best_weights_start_another_run_and_are_exported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(folder, "start").out
    best = torch.load(run / "checkpoints/step_000000004.pt")["model"]
    task = tiny.task("simclr", folder, "from_best", f"init.backbone={run}@best")
    task.prepare()
    state = task.base_model.backbone.state_dict()
    assert all(torch.equal(value, best[f"backbone.{name}"]) for name, value in state.items())
    task.close()
    assert main(["export", f"{run}@best", "--out", str(run / "best")]) == 0
    exported = torch.load(run / "best/backbone.pt")
    assert all(torch.equal(value, best[f"backbone.{name}"]) for name, value in exported.items())
    loaded = selftask.load(f"{run}@best").backbone.state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in loaded.items())
    assert main(["finetune", f"{run}@7"]) == 2
    assert "has no checkpoint of step 7" in capsys.readouterr().err
    assert main(["export", f"{run}@3"]) == 2
    assert "has no checkpoint of step 3; there are: 4, 8, 10" in capsys.readouterr().err


def test_the_list_tells_damaged_from_good(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(folder, "listed", "train.keep_every='5 steps'").out
    assert main(["checkpoints", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[1:]}
    assert list(rows) == ["10", "8", "5", "4"]
    assert "knn_top1 0.7" in rows["4"] and "best 1" in rows["4"]
    assert "0.80" in rows["4"]  # epochs
    assert "for good, newest" in rows["10"]
    assert all(line.endswith("good") for line in rows.values())
    path = run / "checkpoints/step_000000005.pt"
    path.write_bytes(path.read_bytes()[:-10])
    assert main(["checkpoints", str(run)]) == 1
    assert "damaged: " in capsys.readouterr().out
    assert main(["checkpoints", str(folder / "nowhere")]) == 2


def test_no_file_is_begun_that_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path, keep=3, background=False)
    state = {"model": {"weight": torch.zeros(300_000)}}
    writer.save(state, 1)
    monkeypatch.setattr(
        "selftask.checkpoint.writer.shutil.disk_usage",
        lambda path: type("Usage", (), {"free": 1_100_000}),
    )
    with pytest.raises(RunError) as raised:
        writer.save(state, 2)
    assert f"could not be written to {tmp_path}" in str(raised.value)
    assert "1.2 MB are needed and 1.1 MB free" in str(raised.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_000000001.json",
        "step_000000001.pt",
    ]
