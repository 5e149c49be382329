"""A step of one's own that ends with ``update_weights`` is the standard step, bit for bit."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minitask import MiniTask, largest_difference
from selftask.distributed.collectives import all_reduce_mean
from selftask.task.update import update_weights

MOCO = {"out_dim": 5, "queue_size": 32, "symmetric": True}


def short_step(task: Any) -> None:
    batch = task.last_batch = next(task.batches)
    batch.output = task.model(batch.input)
    task.run_hooks("on_forward")
    batch.local_loss = task.loss(batch.output, batch)
    batch.loss = all_reduce_mean(batch.local_loss.detach())
    task.run_hooks("on_loss_and_meter")
    update_weights(task, batch.local_loss)


def halve(task: Any) -> None:
    for parameter in task.parameters:
        parameter.grad = parameter.grad / 2


@pytest.mark.parametrize("scaled", [False, True])
def test_it_is_the_standard_step(scaled: bool) -> None:
    """Losses, the gradients that hooks see, weights, teacher, queue and clock."""
    tasks = [MiniTask("moco", MOCO, step=step) for step in ("standard", short_step)]
    for task in tasks:
        task.grad_scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        # so that it counts on one rank
        task.reduce_gradients = partial(halve, task)  # type: ignore[method-assign]
        task.run(4)
    first, second = (task.state() for task in tasks)
    assert first["clock"]["steps_done"] == 4
    assert len(second["grads"]) == 4
    assert largest_difference(first, second) == 0


def test_a_test_phase_changes_nothing() -> None:
    """What has no optimizer, no scaler and no hooks would fail at the first of them."""
    loss = torch.ones((), requires_grad=True)
    update_weights(SimpleNamespace(train=False), loss)  # type: ignore[arg-type]
    assert loss.grad is None
