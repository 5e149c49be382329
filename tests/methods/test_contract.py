"""What every method promises: a pure loss and a declared number of views."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import tiny
from selftask.batch import total
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.registry import METHODS


@pytest.mark.parametrize("method", METHODS.names())
def test_the_loss_may_be_called_again_and_changes_nothing(method: str, tmp_path: Path) -> None:
    """After a whole step of a trained task, on the batch of the next one."""
    task = tiny.task(method, tmp_path, "run", "eval.evaluations={}")
    task.prepare()
    task.on_start()
    task.on_phase_start()
    task.step()
    batch = task.last_batch = next(task.batches)
    batch.output = task.model(batch.input)
    task.run_hooks("on_forward")
    before = copy.deepcopy(task.loss.state_dict())
    plain = {name: item for name, item in vars(task.loss).items() if isinstance(item, int | float)}
    pending = [len(item) for item in vars(task.loss).values() if isinstance(item, list)]
    added = {name: item for name, item in batch.added.items() if isinstance(item, torch.Tensor)}
    kept = {name: item.clone() for name, item in added.items()}
    losses = [task.loss(batch.output, batch) for _ in range(3)]
    assert len({total(loss).item() for loss in losses}) == 1
    assert tiny.differences(task.loss.state_dict(), before) == []
    now = {name: item for name, item in vars(task.loss).items() if isinstance(item, int | float)}
    assert now == plain
    assert [len(item) for item in vars(task.loss).values() if isinstance(item, list)] == pending
    assert tiny.differences(added, kept) == []
    for loss in losses:
        gradients = torch.autograd.grad(total(loss), batch.output, retain_graph=True)
        assert gradients[0].isfinite().all()
    task.close()


@pytest.mark.parametrize("method", METHODS.names())
def test_another_number_of_views_than_declared_is_refused(method: str) -> None:
    views = METHODS[method].views
    assert METHODS.declared(method, "views", None) == views
    least, most = views if isinstance(views, tuple) else (views, views)
    wrong = [number for number in (least - 1, most and most + 1) if number]
    assert wrong
    for number in wrong:
        groups = f"views={{main: {{count: {number}, transforms: [normalize]}}}}"
        wanted = f"views: {method} needs {least} view.* of an image, got {number}"
        with pytest.raises(ConfigError, match=wanted):
            load_config(method, [groups])
