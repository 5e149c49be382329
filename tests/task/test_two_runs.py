"""Two runs in one process, one after the other: the second does not feel the first."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

import tiny
from selftask.data.reading import files
from selftask.distributed.heartbeat import HEARTBEAT
from selftask.distributed.simulated import SIMULATED
from selftask.hooks.base import function_hook
from selftask.random.keyed import LAYER_DRAWS
from selftask.task import Task
from selftask.task.loop import train_loop

DROP_PATH = "backbone.drop_path=%s"


def fail(task: Task) -> None:
    if task.steps_done:
        raise ZeroDivisionError("in the middle of a step")


def test_a_second_run_in_the_process_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The first one has stochastic depth and other read settings, and fails inside of a step."""
    words = ("train.max_steps=3", DROP_PATH % 0.0)
    alone = tiny.train("dinov2", tmp_path, "alone", *words)

    other = ("train.seed=7", DROP_PATH % 0.5, "data.read_retries=9", "data.max_scans=3")
    first = tiny.task("dinov2", tmp_path, "first", *other)
    first.add_hook(function_hook(on_backward=fail))
    with pytest.raises(ZeroDivisionError):
        train_loop(first)
    assert LAYER_DRAWS.num_layers and LAYER_DRAWS.words is None
    assert (HEARTBEAT.step, HEARTBEAT.waits, SIMULATED.size) == (0, False, 1)

    second = tiny.train("dinov2", tmp_path, "second", *words)
    assert (files.POLICY.retries, files.POLICY.max_scans) == (2, 100)
    states = [tiny.last_state(run.out) for run in (alone, second)]
    assert tiny.differences(*states) == []
    assert tiny.rows(alone.out) == tiny.rows(second.out)


def test_a_finished_run_is_freed_with_the_last_name_for_it(tmp_path: Path) -> None:
    """Python's collector counts objects, not bytes: a cycle would keep networks and images long."""
    tiny.train("byol", tmp_path, "first", "train.max_steps=2")  # imports on demand make cycles
    gc.disable()
    try:
        task = tiny.train("byol", tmp_path, "second", "train.max_steps=2", "hooks.timing={}")
        parts = [weakref.ref(part) for part in (task, task.base_model, task.data_module)]
        del task
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()
