"""Rules of a train step: what it reads, counts and calls is checked in its first steps."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tiny
from selftask.batch import total
from selftask.distributed.collectives import all_reduce_mean
from selftask.errors import UserError
from selftask.hooks.base import Hook, function_hook
from selftask.task import Task
from selftask.task.loop import train_loop
from selftask.task.update import apply_gradients, compute_gradients, forward, update_weights


@pytest.mark.parametrize(
    ("updates", "advances", "optimizer", "warned"),
    [
        (2, 1, "sgd", True),
        (2, 2, "sgd", False),
        (1, 1, "sgd", False),
        (3, 1, "classy:sgd", True),
    ],
)
def test_updates_that_are_not_counted_are_told_once(
    updates: int,
    advances: int,
    optimizer: str,
    warned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def several(task: Task) -> None:
        batch = task.last_batch = next(task.batches)
        batch.output = task.model(batch.input)
        batch.local_loss = task.loss(batch.output, batch)
        batch.loss = all_reduce_mean(batch.local_loss.detach())
        task.run_hooks("on_loss_and_meter")
        task.optimizer.zero_grad()
        batch.local_loss.backward()
        for _ in range(updates):
            task.grad_scaler.step(task.optimizer, where=task.where)
        task.advance()
        if advances == 2:
            task.advance()

    kind = f"optimizer={{name: '{optimizer}', lr: 0.01}}"
    task = tiny.task("simclr", tmp_path, "run", "train.max_steps=4", kind, "hooks.health=null")
    task.train_step_function = several
    with suppress(UserError):  # two steps of one batch
        train_loop(task)
    logged = [text for text in caplog.messages if "optimizer updates" in text]
    expected = f"{updates} optimizer updates in a step that counts 1; schedules, epochs and teach"
    assert [expected in text for text in logged] == ([True] if warned else [])


def test_a_stray_stop_iteration_does_not_end_the_epoch(tmp_path: Path) -> None:
    def ends(task: Task) -> None:
        batch = task.last_batch = next(task.batches)
        next(iter(batch.draws))

    task = tiny.task("simclr", tmp_path)
    task.train_step_function = ends
    line = ends.__code__.co_firstlineno
    place = rf"test_step_check.py:{line}\): the phase ended at batch 0 of 5"
    with pytest.raises(UserError, match=place):
        train_loop(task)

    def stops(task: Task) -> None:
        raise StopIteration

    task = tiny.task("simclr", tmp_path, "hook")
    task.add_hook(function_hook(on_step=stops))
    line = stops.__code__.co_firstlineno
    match = rf"test_step_check.py:{line}: a hook has raised StopIteration at on_step; to end the ru"
    with pytest.raises(UserError, match=match):
        train_loop(task)


def _forward(task: Task) -> Any:
    batch = task.last_batch = next(task.batches)
    forward(task, batch)
    return batch


def _reads_nothing(task: Task) -> None:
    task.advance()


def _does_nothing(task: Task) -> None: ...


def _counts_nothing(task: Task) -> None:
    compute_gradients(task, _forward(task).local_loss)
    task.optimizer.step(where=task.where)


def _counts_one_of_two(task: Task) -> None:
    _forward(task)
    update_weights(task, _forward(task).local_loss)


def _reads_two(task: Task) -> None:
    _forward(task)
    compute_gradients(task, _forward(task).local_loss)
    apply_gradients(task, 2)


def _keeps_the_batch(task: Task) -> None:
    forward(task, next(task.batches))


def _keeps_the_loss(task: Task) -> None:
    batch = task.last_batch = next(task.batches)
    batch.local_loss = task.loss(task.model(batch.input), batch)
    update_weights(task, batch.local_loss)


def _misspells(task: Task) -> None:
    _forward(task)
    task.run_hooks("on_updates")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_reads_nothing, "has read no batch; write batch = task.last_batch = next"),
        (_does_nothing, "has read no batch; write batch = task.last_batch = next"),
        (_counts_nothing, "has read 1 batch and counted 0; end it with task.advance()"),
        (_counts_one_of_two, "has read 2 batches and counted 1; end it with task.advance(2)"),
        (_reads_two, "has read 2 batches, and train.accumulate is 1; read min(task.config"),
        (_keeps_the_batch, ": hooks at on_forward need the batch; write batch = task.last_batch"),
        (_keeps_the_loss, ": hooks at on_backward need the loss; write batch.loss = all_reduce"),
        (_misspells, "no hook point 'on_updates'; did you mean 'on_update'?"),
    ],
)
def test_a_step_that_breaks_the_rules_is_an_error_with_its_place(
    step: Any, message: str, tmp_path: Path
) -> None:
    task = tiny.task("simclr", tmp_path)
    task.train_step_function = step
    with pytest.raises(UserError) as raised:
        train_loop(task)
    assert message in str(raised.value)
    first = step.__code__.co_firstlineno
    line = f":{first + 2}: run_hooks" if step is _misspells else f":{first})"
    assert f"{Path(__file__).name}{line}" in str(raised.value)


def _updates_nothing(task: Task) -> None:
    compute_gradients(task, _forward(task).local_loss)
    task.advance()


def _forgets_the_other_ranks(task: Task) -> None:
    batch = _forward(task)
    task.optimizer.zero_grad()
    batch.local_loss.backward()
    apply_gradients(task)


def _calls_no_hooks(task: Task) -> None:
    batch = task.last_batch = next(task.batches)
    compute_gradients(task, total(task.loss(task.model(batch.input), batch)))
    task.optimizer.step(where=task.where)
    task.advance()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_updates_nothing, "no weights were updated; call task.optimizer.step(where=task.where)"),
        (_forgets_the_other_ranks, "weights were updated without task.reduce_gradients()"),
        (_calls_no_hooks, 'were not called; call task.run_hooks("on_loss_and_meter"), task.run'),
    ],
)
def test_what_a_step_leaves_out_is_logged_once(
    step: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = tiny.task("simclr", tmp_path, "run", "train.max_steps=3")
    task.train_step_function = step
    train_loop(task)
    assert [message in text for text in caplog.messages if "train.step=standard" in text] == [True]


def test_the_shipped_steps_leave_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, words in enumerate(
        (["train.step=accumulate", "train.accumulate=3"], ["train.step=sam"], ["train.step=manual"])
    ):
        tiny.train("byol", tmp_path, f"run{number}", "hooks.clip_gradients={}", *words)
    assert not [text for text in caplog.messages if text.startswith("train.step=")]


def test_a_hook_that_takes_other_arguments_is_named(tmp_path: Path) -> None:
    class Takes(Hook):
        def on_step(self) -> None: ...  # type: ignore[override]

    task = tiny.task("simclr", tmp_path)
    task.add_hook(Takes())
    match = (
        r"test_step_check.py:\d+: the hook point on_step is called with \(task\), and takes \(\)"
    )
    with pytest.raises(UserError, match=match):
        train_loop(task)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("wrap_batches", "wrap_batches returned a NoneType, not an iterator; yield the batches"),
        ("wrap_reduction", "wrap_reduction returned None, not a function that calls `reduce`"),
    ],
)
def test_a_wrapper_that_returns_nothing_is_named(point: str, message: str, tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path)
    task.add_hook(type("Wraps", (Hook,), {point: lambda self, task, wrapped: None})())
    with pytest.raises(UserError, match=r"test_step_check.py:\d+: ") as raised:
        train_loop(task)
    assert message in str(raised.value)
