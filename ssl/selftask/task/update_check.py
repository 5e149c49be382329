"""Check that a train step counts its optimizer updates."""

from __future__ import annotations

from typing import Any

from selftask.logs import get_logger

log = get_logger(__name__)


class UpdateCheck:
    """Warns once if a train step updates the weights more often than it calls ``task.advance``.

    Schedules, epochs, teachers and checkpoints depend on the counted steps, so uncounted updates
    would pass unnoticed.

    Args:
        optimizer: The optimizer of the task.
        name: Name of the train step, for the warning.
    """

    def __init__(self, optimizer: Any, name: str) -> None:
        self.name = name
        self.updates = 0  # in this train step
        self.has_warned = False
        optimizer.optimizer.register_step_post_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.updates += 1

    def compare(self, steps: int) -> None:
        """Warn if there were more updates since the last call than ``steps``, the counted steps."""
        updates, self.updates = self.updates, 0
        if updates > steps and not self.has_warned:
            self.has_warned = True
            log.warning(
                "train.step=%s: %d optimizer updates in a step that counts %d; schedules, epochs "
                "and teachers go by counted steps: call task.advance() after each update, or make "
                "one update a step",
                *(self.name, updates, steps),
            )
