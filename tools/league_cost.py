"""Cost of a method in the league, relative to ``supervised`` on the same network.

It is the CPU time of an image: of reading and augmenting it, forward and backward pass, update, and
of what a method computes between epochs. Building the network and evaluations do not count. The CPU
time is that of all threads of the process (``time.process_time``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

from torch import nn

from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.hooks.base import Hook
from selftask.task import Task
from selftask.task.exported import export_backbone
from selftask.task.loop import train_loop

EPOCHS, TURNS = 3, 2  # of a measurement


class CpuTime(Hook):
    """Measures the CPU time of training.

    Args:
        clock: Returns the CPU time of the process so far.
    """

    priority: ClassVar[int] = 99

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.times: list[float] = []  # at the end of each step, from the start of the first

    def on_start(self, task: Task) -> None:
        self.started = self.clock()

    def on_step(self, task: Task) -> None:
        self.times.append(self.clock() - self.started)


def step_cost(times: list[float], per_epoch: int) -> float:
    """Return the CPU seconds of a step: the least mean of an epoch, without the first epoch.

    Args:
        times: CPU time at the end of each step.
        per_epoch: Steps of an epoch.
    """
    ends = times[per_epoch - 1 :: per_epoch]
    return min(after - before for before, after in pairwise(ends)) / per_epoch


def train(config: Config, sources: Sources) -> tuple[nn.Module, CpuTime]:
    """Train in this process; return the backbone as it is exported, and the times."""
    task, watch = Task(config, sources=sources), CpuTime()
    task.add_hook(watch)
    train_loop(task)
    return export_backbone(task).eval(), watch


def relative_cost(method: Config, reference: Config, sources: Sources) -> float:
    """Return the CPU time of an image of a method, divided by that of ``supervised``.

    Both take turns; the least counts, since other work on the machine only adds.

    Args:
        method: Its config, of ``EPOCHS`` epochs.
        reference: That of ``supervised``, with the same network and batch size.
        sources: The images.
    """
    least = [float("inf"), float("inf")]
    for _ in range(TURNS):
        for index, config in enumerate((method, reference)):
            _, watch = train(config, sources)
            per_epoch = len(watch.times) // EPOCHS
            least[index] = min(least[index], step_cost(watch.times, per_epoch))
    return least[0] / least[1]
