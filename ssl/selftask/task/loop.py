"""The training loop."""

from __future__ import annotations

from selftask.task.task import Task


class Interrupted(Exception):
    """Raised after a requested stop, when a checkpoint to resume from has been saved."""


def train_loop(task: Task) -> None:
    """Prepare a task, then train it phase by phase, step by step.

    Every hook's ``on_exception`` runs before an exception leaves this function.

    Raises:
        Interrupted: If a stop was requested; a checkpoint has been saved.
    """
    try:
        task.prepare()
        task.on_start()
        while not task.done_training():
            task.on_phase_start()
            _run_phase(task)
            task.on_phase_end()
            _stop_if_asked(task)
        task.on_end()
    except BaseException:
        task.on_exception()
        raise
    finally:
        task.close()


def _run_phase(task: Task) -> None:
    while True:
        try:
            task.step()
        except StopIteration:
            return
        if task.interrupted_by is not None and not task.phase_finished:
            _stop_if_asked(task)


def _stop_if_asked(task: Task) -> None:
    """Save and raise Interrupted if a stop was requested."""
    if task.interrupted_by is not None and not task.done_training():
        task.save_checkpoint()
        raise Interrupted(task.interrupted_by)
