"""The shortest complete train step, in float32, to read and to copy."""

from __future__ import annotations

from selftask.distributed.collectives import all_reduce_mean
from selftask.registry import register_train_step
from selftask.task import Task


@register_train_step("manual")
def manual_train_step(task: Task) -> None:
    """Run forward, loss, backward, mean over ranks and optimizer step, in float32 only.

    A test phase stops after the loss.
    """
    batch = task.last_batch = next(task.batches)
    batch.output = task.model(batch.input)
    task.run_hooks("on_forward")
    batch.local_loss = task.loss(batch.output, batch)
    batch.loss = all_reduce_mean(batch.local_loss.detach())
    task.update_meters(batch)
    task.run_hooks("on_loss_and_meter")
    if task.train:
        task.optimizer.zero_grad()
        batch.local_loss.backward()
        task.reduce_gradients()
        task.run_hooks("on_backward")
        task.optimizer.step(where=task.where)
        task.run_hooks("on_update")
        task.advance()
