"""Weights of schedule-free optimizers: averages for evaluation, export and checkpoints.

These optimizers have the methods ``eval()`` and ``train()``, as in the package schedulefree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selftask.task.task import Task


def begin_phase(task: Task) -> None:
    """Set the weights for the phase: averages in a test phase."""
    optimizer = task.optimizer.optimizer
    if hasattr(optimizer, "eval"):
        optimizer.train() if task.train else optimizer.eval()


@contextmanager
def averaged_weights(task: Task) -> Iterator[bool]:
    """Context in which the network has averaged weights; yields True if the optimizer has any."""
    optimizer = task.optimizer.optimizer
    if not hasattr(optimizer, "eval"):
        yield False
        return
    optimizer.eval()
    try:
        yield True
    finally:
        begin_phase(task)
