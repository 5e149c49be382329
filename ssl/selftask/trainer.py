"""Training from Python, with the same run folder and log as ``selftask train``."""

from __future__ import annotations

from selftask.run.run import run_task
from selftask.run.status import Status
from selftask.task import Task
from selftask.task.loop import Interrupted

__all__ = ["Interrupted", "Trainer"]


class Trainer:
    """Trains a task in its run folder, or resumes the run that is there."""

    def train(self, task: Task) -> None:
        """Train to the end; a complete run is only loaded.

        Raises:
            Interrupted: A signal or ``train.stop_at`` ended it; its checkpoint is saved.
            UserError: The folder, the data or the backbone cannot be what the config says.
            Exception: Whatever else went wrong, after it was written down.
        """
        if Status(task.config).says_finished():
            task.prepare()
            task.close()
            return
        run_task(task, raises=True)
