"""Gradient accumulation: several batches per optimizer step."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from selftask.registry import register_train_step
from selftask.task import Task
from selftask.task.update import apply_gradients, forward


@register_train_step("accumulate")
def accumulate_train_step(task: Task) -> None:
    """Average the gradients of ``train.accumulate`` batches, then step the optimizer once.

    Ranks exchange gradients at the last batch only. The gradient is the mean over the batches of
    the step; the last step of an epoch may have fewer batches.

    Each loss still sees one batch: accumulation does *not* enlarge the set of negatives of a
    contrastive method, nor the batch over which BatchNorm or Barlow Twins compute statistics.

    In a test phase, a step reads one batch and stops after the loss.
    """
    if not task.train:
        _forward(task)
        return

    batches = min(task.config.train.accumulate, task.batches_left)
    task.optimizer.zero_grad()
    for number in range(1, batches + 1):
        with nullcontext() if number == batches else task.no_sync():
            loss = _forward(task) * (1.0 / batches)
            task.grad_scaler.scale(loss).backward()

    task.reduce_gradients()
    apply_gradients(task, batches)


def _forward(task: Task) -> Tensor:
    """Run one batch through network and loss; return the loss, with its graph."""
    batch = task.last_batch = next(task.batches)
    forward(task, batch)
    return batch.local_loss
