"""Writers in a thread: steps do not wait for them, and no row is lost at a stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import tiny
from selftask.hooks.base import function_hook
from selftask.hooks.writers import background
from selftask.hooks.writers.background import Background
from selftask.hooks.writers.base import Writer
from selftask.task import Task
from selftask.task.loop import train_loop

SOON_S = 20.0  # far more than what is waited for takes
STEPS = 6


@dataclass(eq=False, kw_only=True)
class Recorded(Writer):
    """Keeps what it is given, after ``before`` has been called."""

    in_background: ClassVar[bool] = True
    takes_media: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.before: Callable[[int], Any] = lambda step: None
        self.steps: list[int] = []
        self.values: dict[int, float] = {}
        self.threads: set[str] = set()
        self.closed: list[bool] = []

    def write(self, step: int, row: dict[str, float]) -> None:
        self.before(step)
        self.threads.add(threading.current_thread().name)
        self.steps.append(step)

    def write_histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        self.values[step] = float(values[0])

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


def run(folder: Path, writer: Writer, *more: str, **hooks: Callable[[Task], None]) -> Task:
    """Train with a row for each step."""
    task = tiny.task("simclr", folder, "run", f"train.max_steps={STEPS}", *more)
    task.add_hook(writer)
    task.add_hook(function_hook(**hooks))
    train_loop(task)
    return task


def test_steps_do_not_wait(tmp_path: Path) -> None:
    """The first row is written when the last step but one has begun; values are those of rows."""
    writer, late, counter = Recorded(), threading.Event(), torch.zeros(3)
    writer.before = lambda step: late.wait(SOON_S)

    def begin(task: Task) -> None:
        task.log_histogram("counter", counter.fill_(task.steps_done + 1))
        if task.steps_done == STEPS - 2:
            assert writer.steps == []
            late.set()

    started = time.monotonic()
    run(tmp_path, writer, before_step=begin)
    assert time.monotonic() - started < SOON_S
    assert writer.steps == [*range(1, STEPS + 1)]
    assert writer.values == {step: step for step in writer.steps}
    assert writer.threads == {"hooks.recorded"}
    assert writer.closed == [False]


@pytest.mark.parametrize("kind", ["error", "stop"])
def test_nothing_is_lost_at_a_stop(kind: str, tmp_path: Path) -> None:
    writer = Recorded()
    writer.before = lambda step: time.sleep(0.05)

    def fail(task: Task) -> None:
        if kind == "error" and task.steps_done == 4:
            raise ZeroDivisionError

    stop = "train.stop_at=4" if kind == "stop" else "train.stop_at=null"
    with pytest.raises(Exception) as raised:  # Interrupted is one
        run(tmp_path, writer, stop, before_step=fail)
    expected = {"error": "ZeroDivisionError", "stop": "Interrupted"}[kind]
    assert type(raised.value).__name__ == expected
    assert writer.steps == [1, 2, 3, 4]
    assert writer.closed == [True]


def test_a_checkpoint_has_its_rows_written(tmp_path: Path) -> None:
    """A resume repeats the rows after the checkpoint only."""
    writer, results = Recorded(), []
    writer.before = lambda step: time.sleep(0.05)
    save = "train.checkpoint_every='2 steps'"
    late = function_hook(priority=200, before_save=lambda task: results.append([*writer.steps]))
    task = tiny.task("simclr", tmp_path, "run", f"train.max_steps={STEPS}", save)
    task.add_hook(writer)
    task.add_hook(late)
    train_loop(task)
    assert results == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


def test_a_writer_that_fails_in_its_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Recorded()

    def fail(step: int) -> None:
        if step == 3:
            raise ConnectionError("no route to host")

    writer.before = fail
    task = run(tmp_path, writer)
    assert task.steps_done == STEPS and writer.steps == [1, 2]
    logged = [text for text in caplog.messages if "hooks.recorded" in text]
    expected = "hooks.recorded has failed and writes no more, training continues: ConnectionError: "
    assert logged == [expected + "no route to host"]
    assert writer.closed == []


def test_a_writer_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends, says how many rows are missing, and does not close what would block."""
    monkeypatch.setattr(background, "PATIENCE_S", 0.5)
    writer, never = Recorded(), threading.Event()
    writer.before = lambda step: never.wait(SOON_S) if step == 5 else None
    task = run(tmp_path, writer, on_end=lambda task: None)
    assert task.steps_done == STEPS and writer.steps == [1, 2, 3, 4]
    logged = [text for text in caplog.messages if "does not answer" in text]
    assert logged[-1] == (
        "hooks.recorded does not answer: 2 rows are not written yet, training continues"
    )
    assert writer.closed == []
    never.set()


def test_training_waits_if_too_many_rows_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "LIMIT", 2)
    writer, ahead = Recorded(), []

    def until_it_waits(step: int) -> None:
        give_up = time.monotonic() + SOON_S
        while not writer.has_warned and time.monotonic() < give_up:
            time.sleep(0.005)

    writer.before = until_it_waits
    run(tmp_path, writer, on_step=lambda task: ahead.append(task.steps_done - len(writer.steps)))
    assert writer.steps == [*range(1, STEPS + 1)]
    assert max(ahead) <= 3, "two wait and one is being counted"
    assert sum("is slower than rows come" in text for text in caplog.messages) == 1


def test_calls_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LIMIT", 2)
    gate, done = threading.Event(), []
    thread = Background("test")
    thread.add(lambda: done.append(gate.wait(SOON_S)))
    thread.add(lambda: done.append(2))
    assert thread.is_full and done == []
    adds = threading.Thread(target=thread.add, args=(lambda: done.append(3),))
    adds.start()
    adds.join(0.1)
    assert adds.is_alive(), "a third call waits"
    gate.set()
    adds.join(SOON_S)
    assert thread.close() == 0
    assert done == [True, 2, 3]
