"""Base class of hooks that send images or histograms to writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selftask.config.fields import setting
from selftask.config.values.duration import steps_in
from selftask.hooks.base import Hook, Task


@dataclass(eq=False, kw_only=True)
class MediaHook(Hook):
    """Base class of hooks that send images or histograms to writers once per period."""

    every: int | str = setting("1 epoch", duration=True, min=1)
    """Time between images or histograms; they are sent in the next logged step."""

    def on_start(self, task: Task) -> None:
        self.period = max(1, steps_in(self.every, task.length))
        self.last_period = self.loaded.get("last_period", -1)

    def is_due(self, task: Task) -> bool:
        """Return True in the first logged step of a period, if a writer takes media.

        A second call in the same step returns False.
        """
        if not (task.takes_media and task.should_log):
            return False
        before, self.last_period = self.last_period, task.steps_done // self.period
        return self.last_period != before

    def state_dict(self) -> dict[str, Any]:
        return {"last_period": self.last_period} if hasattr(self, "last_period") else self.loaded
