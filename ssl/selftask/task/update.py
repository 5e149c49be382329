"""The second half of a train step in one call, for custom train steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from selftask.task.task import Task


def update_weights(task: Task, loss: Tensor) -> None:
    """Run ``train_steps/standard.py`` from ``zero_grad`` on; do nothing in a test phase.

    This scales the loss, runs the backward pass, reduces gradients over ranks, unscales them and
    steps the optimizer at ``task.where``. It calls the hook points ``on_backward`` and
    ``on_update``, and ``task.advance``.

    Args:
        task: The task; ``on_loss_and_meter`` has been called.
        loss: The loss of this rank, with its graph.
    """
    if not task.train:
        return
    task.optimizer.zero_grad()
    task.grad_scaler.scale(loss).backward()
    task.reduce_gradients()
    task.grad_scaler.unscale_(task.optimizer)
    task.run_hooks("on_backward")
    task.grad_scaler.step(task.optimizer, where=task.where)
    task.grad_scaler.update()
    task.run_hooks("on_update")
    task.advance()
