"""Training from Python, with the same run folder and log as ``selftask train``."""

from __future__ import annotations

from selftask.api.objects import restore
from selftask.run.run import run_task
from selftask.run.status import Status
from selftask.task import Task
from selftask.task.loop import Interrupted

__all__ = ["Interrupted", "Trainer"]


class Trainer:
    """Trains a task in its run folder, or resumes the run in that folder."""

    def train(self, task: Task) -> None:
        """Train to the end; if the run is already complete, only load it.

        Args:
            task: The task, not yet prepared.

        Raises:
            Interrupted: If a signal or ``train.stop_at`` stopped the run; a checkpoint is saved.
            UserError: If the folder, the data or the backbone do not match the config.
            Exception: Any other error, after it has been logged.
        """
        restore(task.objects)
        if Status(task.config).is_finished():
            try:
                task.prepare()
            finally:
                task.close()
            return
        run_task(task, raises=True)
