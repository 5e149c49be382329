"""The task and its training loop."""

from selftask.task.task import Task

__all__ = ["Task"]
