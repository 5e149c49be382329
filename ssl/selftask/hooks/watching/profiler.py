"""Traces of chosen steps by torch's profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from selftask.config.fields import setting
from selftask.distributed.collectives import is_primary, rank
from selftask.hooks.base import ReleasedAtEnd, Task
from selftask.logs import get_logger
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("profiler")
@dataclass(eq=False, kw_only=True)
class Profiler(ReleasedAtEnd):
    """Records windows of steps: traces in ``OUT/profile``, the most expensive operators in the log.

    Each window of ``active`` steps follows ``wait`` steps at full speed and ``warmup`` steps whose
    record is discarded. Traces are in Chrome's format, for https://ui.perfetto.dev; with
    ``hooks.timing={}`` they show the sections of a step as ranges. Steps are counted from the start
    or the resume, so that a resumed run is recorded again.
    """

    priority: ClassVar[int] = 110
    wait: int = setting(10, min=0)
    """Number of steps at full speed before the warm-up of each window."""
    warmup: int = setting(2, min=0)
    """Number of warm-up steps before each window."""
    active: int = setting(3, min=1)
    """Number of recorded steps of a window."""
    repeat: int = setting(1, min=1, also=["windows"])
    """Number of windows."""
    top: int = setting(10, min=0)
    """Maximum number of operators listed in the log."""
    all_ranks: bool = False
    """Whether every rank is recorded, instead of the first only."""
    memory: bool = setting(False, also=["profile_memory"])
    """Whether allocations are also recorded."""
    shapes: bool = setting(False, also=["record_shapes"])
    """Whether shapes of the operators' inputs are recorded."""
    stacks: bool = setting(False, also=["with_stack"])
    """Whether source lines are recorded; slow."""

    def on_start(self, task: Task) -> None:
        self.profile: Any = None
        self.steps = 0  # of this attempt
        self.remaining = self.repeat if self.all_ranks or is_primary() else 0  # windows
        self.next = self.wait  # step before which the next window opens

    def before_step(self, task: Task) -> None:
        if self.remaining and self.profile is None and self.steps == self.next:
            self._open(task)

    def on_step(self, task: Task) -> None:
        if not (self.remaining and task.train):
            return
        self.steps += 1
        if self.profile is None:
            return
        self.profile.step()
        if self.steps == self.next + self.warmup + self.active:
            self.release()
            self.remaining -= 1
            self.next = self.steps + self.wait

    def _open(self, task: Task) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if task.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        first = task.steps_done + 1 + self.warmup
        name = f"steps_{first}_to_{first + self.active - 1}_rank{rank()}.json.gz"
        path = task.out / "profile" / name
        path.parent.mkdir(exist_ok=True)

        def write(profile: Any) -> None:
            profile.export_chrome_trace(str(path))
            log.info("profile: %s", path)
            for line in describe_operators(profile, self.top, self.active):
                log.info("%s", line)

        self.profile = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(
                wait=0, warmup=self.warmup, active=self.active, repeat=1
            ),
            on_trace_ready=write,
            profile_memory=self.memory,
            record_shapes=self.shapes,
            with_stack=self.stacks,
        )
        self.profile.start()

    def release(self) -> None:
        """Stop recording; write an unfinished window as it is."""
        profile, self.profile = getattr(self, "profile", None), None
        if profile is not None:
            profile.stop()


def describe_operators(profile: Any, top: int, steps: int) -> list[str]:
    """Return a line for each of the operators with the largest self time.

    It is the time on the GPU if any was recorded, else that on the CPU.

    Args:
        profile: A finished ``torch.profiler.profile``.
        top: Maximum number of operators.
        steps: Number of recorded steps.
    """
    averages = [e for e in profile.key_averages() if not e.key.startswith("ProfilerStep")]
    on_device = any(event.self_device_time_total for event in averages)
    which = "self_device_time_total" if on_device else "self_cpu_time_total"
    spent = sorted(((getattr(e, which), e) for e in averages), key=lambda pair: -pair[0])
    total = sum(us for us, _ in spent) or 1
    return [
        f"  {event.key}: {us / 1e3 / steps:.2f} ms a step ({us / total:.0%}), "
        f"{event.count / steps:.0f} calls"
        for us, event in spent[:top]
    ]
