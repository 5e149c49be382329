"""Check the results that a config expects: ``expected: {knn_top1: [0.66, 0.74]}``."""

from __future__ import annotations

from selftask.errors import RunError, nearest
from selftask.logs import LOGGER
from selftask.task import Task


def check_expected(task: Task) -> None:
    """Raise RunError if the last value of an expected metric is missing or outside its range.

    All ranks have equal values, so all of them raise or none does.
    """
    problems = []
    for name, (low, high) in task.config.expected.items():
        if name not in task.history:
            hint = nearest(name, list(task.history))
            problems.append(f"no row of this run has {name!r}, which is expected; {hint}")
            continue
        value = task.history[name].latest
        text = f"{name} is {value:.4g}, expected {low:g} to {high:g}"
        if low <= value <= high:
            LOGGER.info("expected: %s", text)
        else:
            problems.append(f"{text} ({task.config.place(f'expected.{name}')})")
    if problems:
        raise RunError("; ".join(problems))
