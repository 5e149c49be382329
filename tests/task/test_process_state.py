"""Settings of the process after a run, however it ended: as before it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.api.trainer import Trainer
from selftask.distributed.world import STOP_SIGNALS
from selftask.errors import UserError
from selftask.hooks.base import Hook, function_hook
from selftask.registry import HOOKS
from selftask.task import Task
from selftask.task.loop import train_loop


def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in STOP_SIGNALS}


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = handlers()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Holder(Hook):
    """A hook that counts its releases."""

    released = 0

    def release(self) -> None:
        self.released += 1


def test_abandoned_steps_release_the_hooks(tmp_path: Path) -> None:
    """Otherwise Ctrl-C would be ignored in the rest of the script."""
    before, holder = handlers(), Holder()
    task = tiny.task("simclr", tmp_path)
    task.add_hook(holder)
    steps = task.steps()
    next(steps)
    assert handlers() != before
    steps.close()  # as a `break` in `for step in task.steps()`
    assert handlers() == before
    assert holder.released == 1


@pytest.mark.parametrize("first", [0, 1])
def test_two_tasks_at_once_restore_the_handlers_in_any_order(first: int, tmp_path: Path) -> None:
    before = handlers()
    steps: list[Any] = [
        tiny.task("simclr", tmp_path, f"run{number}").steps() for number in range(2)
    ]
    next(steps[0])
    next(steps[1])
    both = handlers()
    steps[first].close()
    assert (handlers() == both) is (first == 0), "the later task keeps its own"
    steps[1 - first].close()
    assert handlers() == before


def test_a_finished_run_that_is_only_loaded_releases_the_hooks(tmp_path: Path) -> None:
    before = handlers()
    for _ in range(2):  # the second one only loads
        Trainer().train(tiny.task("simclr", tmp_path, "run", "train.max_steps=1"))
        assert handlers() == before


@pytest.mark.usefixtures("forget_names")
def test_hooks_built_before_one_that_cannot_be_built_are_released(tmp_path: Path) -> None:
    class NotInstalled(Hook):
        def __init__(self) -> None:
            raise UserError("the package of this hook is not installed")

    HOOKS.register("not_installed")(NotInstalled)
    before = handlers()
    task = tiny.task("simclr", tmp_path, "run", "hooks.not_installed={}")
    assert list(task.config.hooks)[-1] == "not_installed", "after `preemption`"
    with pytest.raises(UserError, match="not installed"):
        train_loop(task)
    assert handlers() == before


def test_an_error_of_one_release_does_not_keep_the_others(tmp_path: Path) -> None:
    class Failing(Hook):
        def release(self) -> None:
            raise ZeroDivisionError

    def close(task: Task) -> None:
        task.prepare()
        task.close()

    before = handlers()
    for number in range(2):
        task = tiny.task("simclr", tmp_path, f"run{number}")
        task.add_hook(Failing())
        with pytest.raises(ZeroDivisionError):
            close(task)
        assert handlers() == before


def test_no_watch_over_a_script_that_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """It would end a notebook that has been idle for ``launch.hang_timeout_s``."""
    watches: list[threading.Thread] = []

    def interrupt(task: Task) -> None:
        watches.extend(thread for thread in threading.enumerate() if "watch" in thread.name)
        raise KeyboardInterrupt

    task = tiny.task("simclr", tmp_path)
    task.add_hook(function_hook(on_step=interrupt))
    with pytest.raises(KeyboardInterrupt):
        Trainer().train(task)
    (watch,) = watches
    watch.join(timeout=10)
    assert not watch.is_alive()


def test_threads_of_torch_are_those_of_the_script(tmp_path: Path) -> None:
    seen = []
    task = tiny.task("simclr", tmp_path, "run", "train.max_steps=1")
    task.add_hook(function_hook(on_step=lambda task: seen.append(torch.get_num_threads())))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        Trainer().train(task)
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_a_second_run_in_the_process_is_refused_while_one_is_in_progress(tmp_path: Path) -> None:
    """A POSIX lock is the process's, so that of the folder does not stop another thread."""
    errors: list[str] = []

    def train_other(task: Task) -> None:
        for name in ("run", "other"):
            try:
                Trainer().train(tiny.task("simclr", tmp_path, name, "train.max_steps=1"))
            except UserError as error:
                errors.append(str(error))

    def in_a_thread(task: Task) -> None:
        thread = threading.Thread(target=train_other, args=(task,))
        thread.start()
        thread.join()

    task = tiny.task("simclr", tmp_path, "run", "train.max_steps=1")
    task.add_hook(function_hook(on_step=in_a_thread))
    Trainer().train(task)
    assert [error.split(" in progress")[0] for error in errors] == [
        f"out={tmp_path / name}: another run is" for name in ("run", "other")
    ]
    assert not (tmp_path / "other").exists()
    Trainer().train(tiny.task("simclr", tmp_path, "other", "train.max_steps=1"))  # now it may
