"""Report of torch.compile: number of graphs, graph breaks, recompilations."""

from __future__ import annotations

import re
from collections import Counter
from typing import ClassVar

import torch

from selftask.errors import plural
from selftask.hooks.base import Hook, Task
from selftask.logs import get_logger

log = get_logger(__name__)

_REPORT_STEP = 3  # the shapes of the first batches are known then
_MANY_GRAPHS = 8  # number of recompilations after which torch runs code eagerly


class CompileReport(Hook):
    """Logs the number of graphs after the third step, and warns if there are none.

    It also warns of graph breaks, and, at the end of a phase, of eight or more new graphs.
    """

    priority: ClassVar[int] = 95

    def __init__(self) -> None:
        self.steps, self.graphs = 0, 0
        self.breaks_before, self.graphs_before = _breaks(), _num_graphs()

    def on_step(self, task: Task) -> None:
        self.steps += 1
        if self.steps == _REPORT_STEP:
            self._report()

    def on_phase_end(self, task: Task) -> None:
        graphs = _num_graphs() - self.graphs_before
        if self.graphs and graphs - self.graphs >= _MANY_GRAPHS:
            log.warning(
                "compile: %d graphs so far; torch stops compiling a function after %d: shapes "
                "or options change from step to step; try train.compile_options.dynamic=true",
                graphs,
                _MANY_GRAPHS,
            )
            self.graphs = graphs

    def _report(self) -> None:
        self.graphs = _num_graphs() - self.graphs_before
        breaks = _breaks() - self.breaks_before
        if not self.graphs:
            log.warning("compile: no graph was made, the network runs eagerly")
            return
        log.info("compile: %d %s", self.graphs, plural("graph", self.graphs))
        for reason, count in breaks.most_common(3):
            log.warning(
                "compile: %d graph %s, where Python runs code that is not compiled: %s",
                count,
                plural("break", count),
                _shorten(reason),
            )


class RecordedGraphs(Hook):
    """Marks the start of each step for CUDA graphs, and copies the loss, which outlives the step.

    The outputs of all graphs, such as those of teachers and of accumulated batches, are valid until
    the first graph of the next step runs. If they are read later, torch raises an error. Without
    the marks torch guesses where a step begins, and in a test phase it treats each network as a new
    step.
    """

    priority: ClassVar[int] = 0

    def on_phase_start(self, task: Task) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    def on_loss_and_meter(self, task: Task) -> None:
        batch = task.last_batch
        batch.loss = batch.loss.clone()
        batch.terms = {name: term.clone() for name, term in batch.terms.items()}

    def on_step(self, task: Task) -> None:
        torch.compiler.cudagraph_mark_step_begin()


def _num_graphs() -> int:
    from torch._dynamo.utils import counters  # slow to import

    return int(counters["stats"]["unique_graphs"])


def _breaks() -> Counter[str]:
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def _shorten(reason: str) -> str:
    """Return the first line of a reason, with file and line of the user's code if it has them."""
    location = re.search(r'File "([^"]+)", line (\d+)', reason)
    first = reason.strip().splitlines()[0]
    return f"{first} ({location[1]}:{location[2]})" if location else first
