"""The standard train step: one batch, one optimizer step."""

from __future__ import annotations

from selftask.distributed.collectives import all_reduce_mean
from selftask.registry import register_train_step
from selftask.task import Task


@register_train_step("standard")
def standard_train_step(task: Task) -> None:
    """Run forward, loss, backward and optimizer step; a test phase stops after the loss.

    ``StopIteration`` from ``task.batches`` is not caught: it ends the phase.
    """
    batch = task.last_batch = next(task.batches)

    with task.autocast():
        batch.output = task.model(batch.input)
        task.run_hooks("on_forward")  # teacher forward
        batch.local_loss = task.loss(batch.output, batch)

    batch.loss = all_reduce_mean(batch.local_loss.detach())
    task.update_meters(batch)
    task.run_hooks("on_loss_and_meter")  # logging

    if not task.train:
        return

    task.optimizer.zero_grad()
    task.grad_scaler.scale(batch.local_loss).backward()
    task.reduce_gradients()  # before unscale_, which checks for overflow
    task.grad_scaler.unscale_(task.optimizer)
    task.run_hooks("on_backward")  # clipping, freezing: gradients are reduced and unscaled

    task.grad_scaler.step(task.optimizer, where=task.where)  # lr, weight decay at `where`
    task.grad_scaler.update()
    task.run_hooks("on_update")  # teacher EMA update
    task.advance()
