"""Training from Python, with the folder, log and last line that ``selftask train`` has."""

from __future__ import annotations

from selftask.launch.run import run_task
from selftask.launch.status import Status
from selftask.loop import Interrupted
from selftask.task import Task

__all__ = ["Interrupted", "Trainer"]


class Trainer:
    """Trains a task in its run folder, or goes on with the run that is there."""

    def train(self, task: Task) -> None:
        """Train to the end. A run that is complete is loaded, not trained.

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
