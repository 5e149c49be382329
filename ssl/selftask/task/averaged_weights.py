"""Weights of schedule-free optimizers: averages for evaluation, export and checkpoints.

These optimizers have the methods ``eval()`` and ``train()``, as in the package schedulefree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selftask.hooks.base import Task


def set_phase_weights(task: Task) -> None:
    """Switch schedule-free optimizers to the training weights, or to averages in a test phase."""
    for optimizer in _averaging(task):
        optimizer.train() if task.train else optimizer.eval()


@contextmanager
def averaged_weights(task: Task) -> Iterator[bool]:
    """Context in which the network has the averaged weights of schedule-free optimizers.

    Yields True. If there is no such optimizer, it yields False and changes nothing. On exit, the
    weights of the phase are restored.
    """
    averaging = _averaging(task)
    for optimizer in averaging:
        optimizer.eval()
    try:
        yield bool(averaging)
    finally:
        set_phase_weights(task)


def _averaging(task: Task) -> list[Any]:
    """Return the schedule-free optimizers, as torch optimizers."""
    return [one.optimizer for one in task.all_optimizers if hasattr(one.optimizer, "eval")]
