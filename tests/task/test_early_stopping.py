"""Test early stopping, targets, and the directions of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from validated import train

import tiny
from selftask.checkpoint.kept import Kept
from selftask.cli.main import main
from selftask.logs.direction import small_is_good
from selftask.task import Task

FIGURES = {2: 0.5, 4: 0.6, 6: 0.61, 8: 0.3}
STOP = (
    "hooks.early_stopping={patience: 2, min_delta: 0.05}",
    "train.epochs=2",
    "eval={every: 2 steps, evaluations: {knn: {k: [3]}}}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("early_stopping")


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


def test_small_errors_and_distances_are_good() -> None:
    names = ("geolocation_median_km", "kmeans_top1", "depth_linear_rmse", "depth_linear_delta1")
    assert [small_is_good(f"photos/{name}") for name in names] == [True, False, True, False]


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
