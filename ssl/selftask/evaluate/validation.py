"""The method's loss on validation images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from selftask.data.data_module import val_key
from selftask.distributed.accelerator import forked_rng, to_float64
from selftask.distributed.collectives import all_reduce_mean, world_size
from selftask.errors import UserError
from selftask.models.eval_mode import in_eval_mode
from selftask.task import Task
from selftask.task.averaged_weights import averaged_weights
from selftask.task.scoring import forward_without_hooks


@torch.no_grad()
def validation_loss(task: Task, name: str = "") -> dict[str, float]:
    """Return ``val_loss`` and ``val_TERM`` of each term: means over the batches of all ranks.

    The views are those of training with the draws of epoch 0, so they are the same at each
    evaluation and, if the set fills a global batch, on any number of ranks. Network, teachers and
    method are in eval mode, so no statistics change. With a schedule-free optimizer, the network
    has the averaged weights.

    Args:
        task: The task.
        name: Name of a set in ``data.val_sets``; empty for ``data.val``.

    Raises:
        UserError: If there are fewer images than ranks.
    """
    number = len(task.data_module.val_sources[name])
    if number < world_size():
        raise UserError(
            f"eval.loss=true: {val_key(name)} has {number} images, on {world_size()} ranks"
        )
    sums: dict[str, torch.Tensor] = {}
    batches = 0
    with _beside_training(task), in_eval_mode(task.base_model), in_eval_mode(task.loss):
        for batch in task.data_module.val_batches(name):
            forward_without_hooks(task, batch)
            for term, value in {"loss": batch.local_loss, **batch.terms}.items():
                sums[term] = sums.get(term, 0.0) + to_float64(value.detach())
            batches += 1
    terms = sorted(sums)
    means = all_reduce_mean(torch.stack([sums[term] for term in terms]) / batches)
    return {f"val_{term}": value for term, value in zip(terms, means.tolist(), strict=True)}


@contextmanager
def _beside_training(task: Task) -> Iterator[None]:
    """Context of a forward pass outside training; its logged values and draws are discarded."""
    train = task.train
    batch = getattr(task, "last_batch", None)
    task.sync_buffers()
    task.train = False
    try:
        with forked_rng(), averaged_weights(task), task.separate_scalars():
            yield
    finally:
        task.train, task.last_batch = train, batch
