"""Forward pass outside training, and metrics of the whole network on labeled images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from selftask.batch import Batch
from selftask.config.extensions.user_code import source_of
from selftask.distributed.accelerator import to_float64
from selftask.distributed.collectives import all_reduce_sum
from selftask.errors import UserError
from selftask.hooks.base import Task
from selftask.hooks.mixup import unmixed
from selftask.meters.accuracy import Accuracy
from selftask.models.eval_mode import in_eval_mode


def forward_without_hooks(task: Task, batch: Batch) -> None:
    """Compute output and local loss of a batch as a train step does; call no hooks.

    The batch becomes ``task.last_batch``. The method's own ``on_forward`` is called.
    """
    task.last_batch = batch
    train = task.config.train
    if train.uses_compiler and train.compile_options.records_graphs:
        torch.compiler.cudagraph_mark_step_begin()  # of a teacher
    task.loss.prepare_batch(batch, task)
    with task.autocast():
        batch.output = task.base_model(batch.input)
        task.loss.on_forward(task)
        batch.local_loss = task.loss(batch.output, batch)


def update_meters(task: Task, batch: Batch) -> None:
    """Update each meter with class scores and labels of a batch."""
    for meter in task.meters:
        scores, classes = task.loss.for_meter(meter, batch)
        train_set = task.train and isinstance(meter, Accuracy)
        with meter.every_class() if train_set else nullcontext():
            meter.update(scores, unmixed(task, classes) if task.train else classes)


def _values(meter: Any) -> Mapping[str, float]:
    """Return the value of a meter; raise UserError unless it is numbers by name."""
    value = meter.value
    if not isinstance(value, Mapping):
        raise UserError(
            f"{source_of(type(meter))}: value of {type(meter).__name__} is {value!r:.60}; numbers "
            'by name are expected, such as {"top_1": 0.7}'
        )
    return value


def log_meters(task: Task) -> None:
    """Sum the meters over ranks, and log the values of a test phase."""
    for key, meter in zip(task.config.meters, task.meters, strict=True):
        meter.sync_state()
        if not task.train:
            for name, value in _values(meter).items():
                task.log(f"test_{key}_{name}", value)


@torch.no_grad()
def score(task: Task, see: Callable[[Batch], None] | None = None) -> dict[str, float]:
    """Return loss and meters of one pass over ``data.val``, each image once.

    Every rank must call this function. It resets the meters and sets ``task.last_batch``.

    Args:
        task: The task, prepared.
        see: Called with each batch, whose ``output`` is then ``Method.logits`` of the network's
            output: class scores (B, C).

    Returns:
        ``loss``, and the values of each meter as ``METER_VALUE``, where METER is its config key.
    """
    total = to_float64(torch.zeros(2, device=task.device))  # loss, images
    train, task.train = task.train, False
    for meter in task.meters:
        meter.reset()
    try:
        with in_eval_mode(task.base_model), in_eval_mode(task.loss):
            for batch in task.data_module.test_batches():
                forward_without_hooks(task, batch)
                task.update_meters(batch)
                if see is not None:
                    batch.output = task.loss.logits(batch.output)
                    see(batch)
                images = len(batch.labels)
                loss = to_float64(batch.local_loss)
                total += torch.stack([loss * images, total.new_tensor(images)])
    finally:
        task.train = train
    sum_of_losses, images = all_reduce_sum(total).tolist()
    row = {"loss": sum_of_losses / images}
    for key, meter in zip(task.config.meters, task.meters, strict=True):
        meter.sync_state()
        row |= {f"{key}_{name}": value for name, value in _values(meter).items()}
    return row
