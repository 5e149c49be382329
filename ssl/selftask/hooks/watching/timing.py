"""Time of each section of a step, in every row of the log and summed over the run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.accelerator import is_accelerator, record_event
from selftask.errors import UserError
from selftask.hooks.base import Hook, Task
from selftask.logs import get_logger
from selftask.logs.rows import SECTIONS
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("timing")
@dataclass(eq=False, kw_only=True)
class Timing(Hook):
    """Logs the milliseconds that a step spends in each section, as ``ms_forward`` and so on.

    They are means over the steps since the last row. Works with any train step: sections are
    detected by hooks on the parts of the task. Time is attributed to the section that began last:

    * ``read``: waiting for the batch, and the method's ``prepare_batch``;
    * ``forward``, ``loss`` and ``backward``, with the part of the reduction that overlaps;
    * ``reduce``: the rest of the reduction;
    * ``update``: the optimizer;
    * ``hooks``: everything else, such as teachers, clipping and logging.

    Sections are also ranges of torch's profiler. On a GPU, times are measured with device events,
    which are read in logged steps only, so that the host does not wait in between.
    """

    priority: ClassVar[int] = 100
    skip: int = setting(3, min=0, also=["warmup_iter"])
    """Number of first steps that the final summary ignores, since kernels are chosen or compiled in
    them.
    """
    nvtx: bool = False
    """Whether sections are also NVTX ranges, for Nsight Systems."""

    def __post_init__(self) -> None:
        self.clock: Callable[[], Any] = time.perf_counter
        self.listening = False  # False in test phases
        self.marks: list[tuple[str | None, Any]] = []  # section and start time
        self.range: ExitStack | None = None  # current profiler range
        self.seen = self.steps = self.all_steps = 0  # in this process, the row, the summary
        self.row: defaultdict[str, float] = defaultdict(float)  # ms per section
        self.total: defaultdict[str, float] = defaultdict(float)  # ms per section

    def on_start(self, task: Task) -> None:
        if self.nvtx and task.device.type != "cuda":
            raise UserError(
                f"hooks.timing.nvtx: NVTX ranges are for CUDA, this run is on {task.device.type}"
            )
        if is_accelerator(task.device):
            self.clock = partial(record_event, task.device, timing=True)
        for name, module in (("forward", task.model), ("loss", task.loss)):
            module.register_forward_pre_hook(partial(self._begin, name), prepend=True)
            module.register_forward_hook(partial(self._begin, "hooks"))
        task.optimizer.optimizer.register_step_pre_hook(partial(self._begin, "update"))
        task.optimizer.optimizer.register_step_post_hook(partial(self._begin, "hooks"))

    def on_phase_start(self, task: Task) -> None:
        self.listening = task.train

    def on_loss_and_meter(self, task: Task) -> None:
        self._begin("backward")

    def on_update(self, task: Task) -> None:
        self.steps, self.seen = self.steps + 1, self.seen + 1
        if not (task.should_log or self.seen == self.skip):
            return
        spent = self._take()
        self.all_steps = max(0, self.seen - self.skip)
        for section in SECTIONS:
            self.row[section] += spent[section]
            self.total[section] += spent[section] if self.all_steps else 0.0
        if task.should_log:
            for section in SECTIONS:
                task.log(f"ms_{section}", self.row[section] / self.steps)
            self.row.clear()
            self.steps = 0

    def on_phase_end(self, task: Task) -> None:
        self._begin(None)  # evaluations are not part of a step

    def on_end(self, task: Task) -> None:
        total = sum(self.total.values())
        if total:
            parts = [
                f"{section} {ms / self.all_steps:.1f} ({ms / total:.0%})"
                for section, ms in self.total.items()
            ]
            log.info("milliseconds a step: %s", ", ".join(parts))

    def on_exception(self, task: Task) -> None:
        self._begin(None)

    def wrap_reduction(self, task: Task, reduce: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            self._begin("reduce")
            reduce()
            self._begin("hooks")

        return timed

    def wrap_batches(self, task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            self._begin("read")
            batch = next(batches, None)
            self._begin("hooks")
            if batch is None:
                return
            yield batch

    def _begin(self, section: str | None, *_: Any) -> None:
        """Start ``section``; None stops the measurement. Also a hook of modules and optimizers."""
        if not self.listening:
            return
        if self.range is not None:
            self.range.close()
        self.range = None if section is None else self._open_range(section)
        self.marks.append((section, self.clock()))

    def _open_range(self, section: str) -> ExitStack:
        """Enter the profiler range of a section, and the NVTX range if enabled."""
        ranges = ExitStack()
        ranges.enter_context(torch.profiler.record_function(section))
        if self.nvtx:
            ranges.enter_context(torch.cuda.nvtx.range(section))
        return ranges

    def _take(self) -> defaultdict[str, float]:
        """Return milliseconds by section since the last call; wait for the device."""
        self._begin("hooks")
        spent: defaultdict[str, float] = defaultdict(float)
        for (section, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if section is not None:
                spent[section] += milliseconds(start, end)
        del self.marks[:-1]
        return spent


def milliseconds(start: Any, end: Any) -> float:
    """Return the time between two moments, in ms.

    Args:
        start: A reading of ``time.perf_counter`` in seconds, or an event of a device.
        end: The same at the end. The host waits for an event.
    """
    if isinstance(end, float):
        return float(1e3 * (end - start))
    end.synchronize()
    return float(start.elapsed_time(end))
