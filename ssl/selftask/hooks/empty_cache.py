"""Release the accelerator's cached memory to the driver at regular intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from selftask.config.fields import setting
from selftask.distributed.accelerator import empty_cache
from selftask.hooks.base import Hook, Task
from selftask.registry import register_hook


@register_hook("empty_cache")
@dataclass(eq=False, kw_only=True)
class EmptyCache(Hook):
    """Empties the allocator's cache every ``every`` steps and at the end of each phase.

    Helps if memory is fragmented, or shared with another process. The next steps are slower, since
    they allocate memory again.
    """

    priority: ClassVar[int] = 90
    every: int = setting(1000, min=1)
    """Number of train steps between releases of the cache."""

    def on_step(self, task: Task) -> None:
        if task.train and task.steps_done % self.every == 0:
            empty_cache(task.device)

    def on_phase_end(self, task: Task) -> None:
        empty_cache(task.device)
