"""A step that is abandoned leaves a trace in the counters only.

BatchNorm's running statistics have seen the batch; ``train.on_nan: skip`` takes that back.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tiny
from selftask.errors import StepSkipped
from selftask.hooks.base import Hook
from selftask.parallel.reduction import Reduction
from selftask.registry import HOOKS
from selftask.task import Task

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(eq=False, kw_only=True)
class Abandon(Hook):
    """Abandons steps after the forward pass, or after the backward pass."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)

    def on_loss_and_meter(self, task: Task) -> None:
        if task.steps_done + 1 in self.forward:
            raise StepSkipped

    def on_backward(self, task: Task) -> None:
        if task.steps_done + 1 in self.backward:
            raise StepSkipped


@pytest.fixture
def abandon(forget_names: None) -> None:
    HOOKS.register("abandon")(Abandon)


def moved(task: Task) -> dict[str, Any]:
    """A copy of what an update moves."""
    state = task.state_dict()
    parts = {
        name: {
            key: value for key, value in state[name].items() if key.split(".")[-1] not in STATISTICS
        }
        for name in ("model", "method")
    }
    return copy.deepcopy({**parts, "optimizer": state["optimizer"]})


@pytest.mark.parametrize("method", ["moco", "dino", "swav", "pirl"])
def test_no_trace_but_in_the_counters(
    tmp_path: Path, abandon: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    discarded: list[Reduction] = []  # gradients that FSDP keeps outside of ``Parameter.grad``
    monkeypatch.setattr(Reduction, "discard", lambda self: discarded.append(self))
    task = tiny.task(method, tmp_path, "run", "hooks.abandon={forward: [2], backward: [3]}")
    task.prepare()
    task.on_start()
    task.on_phase_start()
    task.step()
    before, where = moved(task), task.where
    task.step()
    task.step()
    assert not tiny.differences(before, moved(task))
    assert not task.loss.pending
    assert discarded == [task.reduction] * 2
    assert task.where == where
    assert (task.steps_done, task.clock.batch, task.clock.skipped) == (3, 3, 2)
    assert all(parameter.grad is None for parameter in task.base_model.parameters())
    task.close()


def test_a_skipped_step_of_several_batches(tmp_path: Path, abandon: None) -> None:
    """Two batches a step, five an epoch: the first step reads one before it is abandoned."""
    more = ("train.step=accumulate", "train.accumulate=2", "hooks.abandon={forward: [1]}")
    task = tiny.train("simclr", tmp_path, "run", *more)
    assert (task.clock.batch, task.clock.skipped) == (15, 1)
    assert task.clock.done


def test_a_run_that_ends_within_a_step(tmp_path: Path, abandon: None) -> None:
    """Four batches in steps of two; one batch is left after the abandoned step."""
    more = ("train.step=accumulate", "train.accumulate=2", "hooks.abandon={forward: [1]}")
    task = tiny.train("simclr", tmp_path, "run", *more, "train.max_steps=2")
    assert task.clock.batch == task.length.total_batches == 4
    assert task.clock.steps_done == 3  # of one batch, two, one


def test_resume_after_skipped_steps(tmp_path: Path, abandon: None) -> None:
    hook = "hooks.abandon={forward: [2, 7], backward: [4]}"
    tiny.train("moco", tmp_path, "whole", hook)
    for stop in ("train.stop_at=3", "train.stop_at=8", "train.stop_at=null"):
        tiny.train("moco", tmp_path, "parts", hook, stop)
    whole, parts = (tiny.last_state(tmp_path / out) for out in ("whole", "parts"))
    assert whole["clock"]["skipped"] == 3
    assert not tiny.differences(whole, parts)
    assert tiny.rows(tmp_path / "whole") == tiny.rows(tmp_path / "parts")
