"""Snapshots of the GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from selftask.config.fields import setting
from selftask.distributed.collectives import rank
from selftask.errors import UserError
from selftask.hooks.base import Hook, Task
from selftask.logs import get_logger
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("memory_snapshot")
@dataclass(eq=False, kw_only=True)
class MemorySnapshot(Hook):
    """Writes snapshots of a CUDA GPU's memory, after a step and when memory runs out.

    ``OUT/profile/memory_NAME_rankN.pickle`` contains each block of memory with the line that
    allocated it, for https://pytorch.org/memory_viz; for this, every allocation is recorded.
    ``OUT/profile/memory_NAME_rankN.txt`` is the table of ``torch.cuda.memory_summary``. NAME is
    ``step_N``, or ``full`` when memory runs out.
    """

    priority: ClassVar[int] = 110
    at_step: int | None = setting(None, min=1)
    """Step after which a snapshot is also written; null: only when memory runs out."""
    max_entries: int = setting(100_000, min=1)
    """Maximum number of recorded allocations; the newest are kept."""
    write: Literal["snapshot", "summary", "both"] = "snapshot"
    """Files to write: the pickle (snapshot), the table (summary) or both. ``summary`` alone records
    nothing and does not slow down steps.
    """

    def __post_init__(self) -> None:
        self.is_recording = False

    def on_start(self, task: Task) -> None:
        if task.device.type != "cuda":
            raise UserError(
                "hooks.memory_snapshot records the allocator of CUDA, and this run is on "
                f"{task.device.type}; memory_mb in metrics.jsonl is the memory of the process, and "
                "hooks.profiler={memory: true} records allocations on any device"
            )
        if self.write != "summary":
            torch.cuda.memory._record_memory_history(max_entries=self.max_entries)
            self.is_recording = True

    def on_step(self, task: Task) -> None:
        if task.train and task.steps_done == self.at_step:
            self._write(task, f"step_{task.steps_done}")

    def release(self) -> None:
        if self.is_recording:
            self.is_recording = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def on_exception(self, task: Task) -> None:
        if isinstance(task.exception, torch.OutOfMemoryError):
            self._write(task, "full")

    def _write(self, task: Task, name: str) -> None:
        path = task.out / "profile" / f"memory_{name}_rank{rank()}.pickle"
        path.parent.mkdir(exist_ok=True)
        if self.write != "summary":
            torch.cuda.memory._dump_snapshot(str(path))
            log.info("memory snapshot: %s", path)
        if self.write != "snapshot":
            table = path.with_suffix(".txt")
            table.write_text(torch.cuda.memory_summary(task.device) + "\n", encoding="utf-8")
            log.info("memory summary: %s", table)
