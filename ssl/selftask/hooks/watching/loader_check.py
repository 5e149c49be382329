"""Comparison of the speeds of loader and device in the first steps."""

from __future__ import annotations

import statistics
from typing import Any, ClassVar

from selftask.config.values.auto_values import cores_of_ranks
from selftask.data.loading.data_stall import Cores, advice_at_start, loader_advice
from selftask.distributed.accelerator import is_accelerator, record_event
from selftask.hooks.base import Hook, Task
from selftask.logs import get_logger

log = get_logger(__name__)

FIRST, LAST = 11, 20  # timed steps; before them the device selects algorithms
QUEUED = 5  # steps after which the last timed one has ended, so that the host does not wait


class LoaderCheck(Hook):
    """Warns after the first steps if the device will wait for data at least 20 % of the time.

    The workers then take at least 1.25 times as long for a batch as the device for a step. Training
    itself waits only later, since prefetched batches are used first and the host runs ahead of the
    device. The device is timed from the forward pass to the end of a step, without waiting for it;
    workers time each batch. After ``LAST + QUEUED`` steps the hook removes itself.
    """

    priority: ClassVar[int] = 90

    def __init__(self) -> None:
        self.steps = 0
        self.start: Any = None  # event of the current step's forward pass
        self.times: list[tuple[Any, Any]] = []

    @staticmethod
    def applies(task: Task) -> bool:
        """Return True if workers augment for an accelerator and a step reads a single batch."""
        data, train = task.config.data, task.config.train
        made_by_workers = data.num_workers > 0 and data.augment_on == "cpu"
        return made_by_workers and is_accelerator(task.device) and train.accumulate == 1

    def on_step(self, task: Task) -> None:
        if not task.train:
            return
        self.steps += 1
        if self.start is not None:
            self.times.append((self.start, record_event(task.device, timing=True)))
            self.start = None
        if self.steps == FIRST - 1:
            self.handle = task.model.register_forward_pre_hook(self._begin)
            self.device = task.device
        elif self.steps == LAST:
            self.handle.remove()
        elif self.steps == LAST + QUEUED:
            task.calls["on_step"] = [c for c in task.calls["on_step"] if c != self.on_step]
            self._compare(task)

    def _begin(self, *_: Any) -> None:
        if self.start is None:  # the first pass of the step
            self.start = record_event(self.device, timing=True)

    def _compare(self, task: Task) -> None:
        loader_s = task.data_module.loader_s
        if loader_s is None or not self.times:
            return
        self.times[-1][1].synchronize()
        step_s = statistics.median(start.elapsed_time(end) for start, end in self.times) / 1e3
        if text := advice_at_start(loader_s, step_s, task.length.batch_size, advice(task)):
            log.warning("step %d: %s", task.steps_done, text)


def advice(task: Task) -> str:
    """Return advice for faster loading of the batches of a run."""
    machine = Cores(cores_of_ranks(task.world), task.world.local_size)
    data = task.config.data
    recipe = task.config.out_folder / "config.yaml"  # recipe with all values set
    is_idle = is_accelerator(task.device) and data.augment_on == "cpu"
    return loader_advice(data.num_workers, machine, str(recipe), has_idle_device=is_idle)
