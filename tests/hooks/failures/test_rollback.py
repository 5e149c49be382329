"""``train.on_nan=rollback``: going back to a checkpoint after NaN."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nan_runs import failure, inject

import tiny
from run_folders import read_events
from selftask.checkpoint.writer import CheckpointWriter
from selftask.hooks.base import function_hook
from selftask.hooks.failures.non_finite import NonFiniteGuard, NonFiniteLoss
from selftask.hooks.writers.csv_table import Csv
from selftask.task import build, repeat
from selftask.task.loop import Interrupted, train_loop


def test_rollback_is_what_skip_is(tmp_path: Path) -> None:
    """With a row for each step, exactly the affected step is left out; rows appear once."""
    for policy in ("skip", "rollback"):
        tiny.train("moco", tmp_path, policy, f"train.on_nan={policy}", inject("nan_input", 7))
    skip, rollback = (tiny.last_state(tmp_path / policy) for policy in ("skip", "rollback"))
    for part in ("model", "method", "optimizer", "clock"):
        assert not tiny.differences(skip[part], rollback[part]), part
    assert tiny.rows(tmp_path / "skip") == tiny.rows(tmp_path / "rollback")


def test_rollback_skips_a_gradient_in_the_step_of_a_checkpoint(tmp_path: Path) -> None:
    """The weights after it are not finite, so it must not be the checkpoint to go back to."""
    every = "train.checkpoint_every='2 steps'"
    for policy in ("skip", "rollback"):
        more = (every, f"train.on_nan={policy}", inject("nan_gradient", 4))
        tiny.train("simclr", tmp_path, policy, *more)
    skip, rollback = (tiny.last_state(tmp_path / policy) for policy in ("skip", "rollback"))
    for part in ("model", "method", "optimizer", "clock"):
        assert not tiny.differences(skip[part], rollback[part]), part


def test_a_compiled_run_goes_back(tmp_path: Path) -> None:
    compiled = ("train.compile=model", "train.compile_options.backend=eager")
    text = failure(tmp_path, inject("nan_input", 3), *compiled)
    assert "the loss is nan at step 3 on rank 0: its images are not finite" in text


def test_a_resume_after_a_rollback_misses_no_hook(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = ("train.on_nan=rollback", inject("nan_input", 3))
    with pytest.raises(Interrupted):
        train_loop(tiny.task("simclr", tmp_path, "run", *more, "train.stop_at=5"))
    with caplog.at_level("WARNING", logger="selftask"):
        train_loop(tiny.task("simclr", tmp_path, "run", *more))
    assert not [text for text in caplog.messages if "non_finite" in text]


def test_rollback_leaves_out_the_rest_of_the_window(tmp_path: Path) -> None:
    more = ("train.on_nan=rollback", "train.log_every=4", inject("nan_input", 7))
    task = tiny.train("simclr", tmp_path, "run", *more)
    assert (task.steps_done, task.clock.skipped) == (tiny.STEPS, 2)  # 7, and 8, the next row
    assert task.rollbacks == 1


def test_rollback_discards_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    """Without a checkpoint: rows in the history, values for the next row, and an average."""
    swa = ("hooks.swa={start: 2, every: 1}", "train.max_steps=4")
    more = ("train.on_nan=rollback", *swa, inject("nan_input", 4))
    task = tiny.task("simclr", tmp_path, "run", *more)
    begun = []

    def note(task: Any) -> None:
        begun.append((task.steps_done, "swa" in task.averages))

    def log_last(task: Any) -> None:
        if task.clock.step == 4:
            task.log("of_step_4", 1.0)

    def add_change(task: Any) -> None:
        task.before_export.append(lambda backbone: backbone)

    task.add_hook(function_hook(on_step=note, on_forward=log_last, on_start=add_change))
    train_loop(task)
    assert len(task.before_export) == 1
    assert not [row for row in tiny.rows(task.out) if row["step"] < 4 and "of_step_4" in row]
    assert task.rollbacks == 1
    assert begun[4:6] == [(1, False), (2, True)]
    assert list(task.history["loss"].steps) == [1, 2, 3]


def test_dumps_are_counted_over_all_rollbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run could fill the disk with them."""
    guards: list[NonFiniteGuard] = []
    monkeypatch.setattr(repeat, "_restart", lambda task, guard, checkpoint: guards.append(guard))
    task: Any = tiny.task("simclr", tmp_path, "run", "train.on_nan=rollback")
    task.clock = SimpleNamespace(batch=3)
    error = NonFiniteLoss("the loss is nan", step=3)
    repeat.recover(task, error)
    guards[0].dumps = 2
    task.added_hooks["non_finite"] = guards[0]
    repeat.recover(task, error)
    assert [guard.dumps for guard in guards] == [2, 2]
    assert task.rollbacks == 2


def test_rollback_keeps_one_network_in_memory_and_opens_writers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two networks may not fit; a writer of ``add_hook`` is not built anew."""
    old: list[Any] = []
    build_network = build.network

    def build_alone(*args: Any) -> Any:
        gc.collect()
        assert [network() for network in old] == [None] * len(old)
        built = build_network(*args)
        old.append(weakref.ref(built[1]))
        return built

    monkeypatch.setattr(build, "network", build_alone)
    more = ("train.on_nan=rollback", "train.checkpoint_every=2", inject("nan_input", 4))
    task = tiny.task("moco", tmp_path, "run", *more, "hooks.swa={start: 1, every: 1}")
    task.add_hook(Csv(), "table")
    train_loop(task)
    assert task.rollbacks == 1 and len(old) == 2
    lines = (task.out / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + len(tiny.rows(task.out))


def test_a_run_from_another_goes_back_to_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own first checkpoint is of step 5. Going back is no resume."""
    tiny.train("simclr", tmp_path, "first", "train.stop_at=3")
    resume = f"resume={tmp_path}/first/checkpoints/step_000000003.pt"
    tiny.train("simclr", tmp_path, "run", resume, "train.on_nan=rollback", inject("nan_input", 4))
    assert "going back to step 3, to repeat" in caplog.text
    assert [e["step"] for e in read_events(tmp_path / "run") if e["event"] == "resume"] == [3]


@pytest.mark.parametrize(("fails", "begin"), [(False, 2), (True, 0)])
def test_a_checkpoint_that_is_being_written_is_waited_for(
    tmp_path: Path,
    fails: bool,
    begin: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one of step 2 is on disk after step 3 has failed, or cannot be written."""
    write, is_late = CheckpointWriter._write, threading.Event()

    def write_late(writer: CheckpointWriter, state: Any, step: int) -> None:
        is_first = not is_late.is_set()
        assert is_late.wait(60)
        if is_first and fails:
            raise OSError(errno.EIO, "Input/output error")
        write(writer, state, step)

    def start_timer(task: Any) -> None:
        if task.steps_done == 2:
            threading.Timer(0.5, is_late.set).start()

    monkeypatch.setattr(CheckpointWriter, "_write", write_late)
    task = tiny.task("simclr", tmp_path, "run", "train.checkpoint_every=2", inject("nan_input", 3))
    task.add_hook(function_hook(on_loss_and_meter=start_timer))
    with pytest.raises(NonFiniteLoss, match="is nan at step 3 on rank 0: its images are not fin"):
        train_loop(task)
    assert f"going back to step {begin}, to repeat" in caplog.text
    assert ("the newest checkpoint is missing, too" in caplog.text) == fails


def test_rollback_ends_with_its_budget(tmp_path: Path) -> None:
    more = ("train.on_nan=rollback", "train.nan_budget=0", inject("nan_input", 7))
    assert "after 0 rollbacks" in failure(tmp_path, *more)
