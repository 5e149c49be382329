"""The second half of a train step in one call, for steps of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from selftask.task.task import Task


def update_weights(task: Task, loss: Tensor) -> None:
    """Do what ``train_steps/standard.py`` does from ``zero_grad`` on; nothing in a test phase.

    Scale, backward, reduction over ranks, unscale, optimizer step at ``task.where``; the hook
    points ``on_backward`` and ``on_update``; and ``task.advance``.

    Args:
        task: The task; its hooks have seen the loss.
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
