"""Parts shared by several train steps; ``train_steps/standard.py`` has the same code in full."""

from __future__ import annotations

from torch import Tensor

from selftask.batch import Batch
from selftask.distributed.collectives import all_reduce_mean
from selftask.hooks.base import Task


def forward(task: Task, batch: Batch) -> None:
    """Set ``output``, ``local_loss`` and ``loss`` of a batch by a forward pass.

    ``local_loss`` has this rank's graph; ``loss`` is the mean over ranks, without one, so every
    rank must call this function. Hooks are called at ``on_forward`` and ``on_loss_and_meter``; they
    read ``task.last_batch``, which must be this batch. Meters are updated in a test phase.
    """
    with task.autocast():
        batch.output = task.model(batch.input)
        task.run_hooks("on_forward")
        batch.local_loss = task.loss(batch.output, batch)
    record_loss(task, batch)


def record_loss(task: Task, batch: Batch) -> None:
    """Set ``batch.loss``, the mean over ranks; update the meters, call ``on_loss_and_meter``."""
    batch.loss = all_reduce_mean(batch.local_loss.detach())
    task.update_meters(batch)
    task.run_hooks("on_loss_and_meter")


def update_weights(task: Task, loss: Tensor) -> None:
    """Update the weights as ``train_steps/standard.py`` does; do nothing in a test phase.

    This function scales the loss, runs the backward pass, reduces gradients over ranks, unscales
    them and steps the optimizer at ``task.where``. It calls the hook points ``on_backward`` and
    ``on_update``, and ``task.advance``.

    Args:
        task: The task; ``on_loss_and_meter`` has been called.
        loss: The loss of this rank, with its graph.
    """
    if not task.train:
        return
    compute_gradients(task, loss)
    apply_gradients(task)


def compute_gradients(task: Task, loss: Tensor) -> None:
    """Replace the gradients by those of a scalar loss, scaled and averaged over ranks."""
    task.optimizer.zero_grad()
    task.grad_scaler.scale(loss).backward()
    task.reduce_gradients()


def apply_gradients(task: Task, batches: int = 1) -> None:
    """Unscale reduced gradients, step the optimizer and count the step.

    Calls the hook points ``on_backward`` and ``on_update``.

    Args:
        task: The task; ``task.reduce_gradients`` has been called.
        batches: Number of global batches of this step.
    """
    task.grad_scaler.unscale_(task.optimizer)
    task.run_hooks("on_backward")
    task.grad_scaler.step(task.optimizer, where=task.where)
    task.grad_scaler.update()
    task.run_hooks("on_update")
    task.advance(batches)
