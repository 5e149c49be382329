"""A metric that a hook acts on: its value in each row, and a warning if no row has it."""

from __future__ import annotations

from selftask.distributed.collectives import gather_objects
from selftask.errors import nearest
from selftask.hooks.base import Task
from selftask.logs import get_logger

log = get_logger(__name__)


class WatchedMetric:
    """The values of a column of ``metrics.jsonl``, from the first step on.

    Args:
        key: Config key that names the column, for the warning.
        name: The column, or None to watch nothing.
        is_known: Whether an earlier row had it, such as that of step 0.
    """

    def __init__(self, key: str, name: str | None, *, is_known: bool = False) -> None:
        self.key, self.name = key, name
        # columns of rows without it; None once it is found
        self._others: set[str] | None = None if is_known else set()

    def value(self, task: Task) -> float | None:
        """Return rank 0's value in the newest row; None if the row lacks it or is of step 0.

        Every rank must call this method.
        """
        if self.name is None or not task.steps_done:  # such as an evaluation before training
            return None
        value = task.last_row.get(self.name)
        if value is None:
            if self._others is not None:
                self._others |= task.last_row.keys()
            return None
        self._others = None
        return gather_objects(float(value))[0]

    def warn_if_missing(self, text: str = "no row has it yet") -> None:
        """Warn once if there were rows but none had the metric."""
        if self.name is not None and self._others:
            hint = nearest(self.name, sorted(self._others))
            log.warning("%s=%s: %s; %s", self.key, self.name, text, hint)
            self._others = None
