"""Check that a train step follows the rules of docs/how-to-own-step.md."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from selftask.batch import Batch
from selftask.config.extensions.user_code import source_of
from selftask.errors import UserError
from selftask.hooks.base import Task
from selftask.logs import get_logger
from selftask.optim.loss_scaler import LossScaler

log = get_logger(__name__)

_CHECKED = 20  # steps
STEP_POINTS = ("on_forward", "on_loss_and_meter", "on_backward", "on_update")
_READ = "batch = task.last_batch = next(task.batches)"


class StepCheck:
    """Check of what a train step does in its first steps, at its hook points and at its end.

    Epochs, schedules and resuming depend on the counted batches, so a wrong number is an error.
    What a step may leave out on purpose is a warning, once in a run. Later steps are not checked: a
    step that follows the rules at first follows them later.

    Args:
        task: The task, with its optimizers and loss scaler.
    """

    def __init__(self, task: Task) -> None:
        self.updates = self.other_updates = self.reads = self.reductions = 0  # in this step
        self.points: set[str] = set()  # hook points of this step
        self.skips_updates = isinstance(task.grad_scaler, LossScaler)  # after an overflow
        # A weak reference to the batches whose reads are counted: workers end with their iterator.
        self.counted: Callable[[], Iterator[Batch] | None] = lambda: None
        self.remaining = _CHECKED  # steps to check
        self.has_warned = False
        self.handles = [task.optimizer.optimizer.register_step_post_hook(self._count_update)]
        for other in task.optimizers.values():
            self.handles.append(other.optimizer.register_step_post_hook(self._count_other))

    def _count_update(self, *args: Any) -> None:
        self.updates += 1

    def _count_other(self, *args: Any) -> None:
        self.other_updates += 1

    def begin(self, task: Task) -> None:
        """Begin a train step; ``task.batches`` is wrapped to count the batches that it reads."""
        if not self.remaining:
            return
        self.updates = self.other_updates = self.reads = self.reductions = 0
        self.points.clear()
        self.before, self.batches_left = (task.steps_done, task.clock.batch), task.batches_left
        if task.batches is not self.counted():  # a new phase, or replaced by the user
            task.batches = self._count_reads(task.batches)
            self.counted = weakref.ref(task.batches)

    def _count_reads(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.reads += 1
            yield batch

    def at(self, point: str, task: Task) -> None:
        """Raise UserError if the hooks at ``point`` would not find batch or loss."""
        if point not in STEP_POINTS:
            return
        self.points.add(point)
        batch = getattr(task, "last_batch", None)
        if batch is None:
            raise UserError(f"{_subject(task)}: hooks at {point} need the batch; write {_READ}")
        if batch.loss is None and point != "on_forward":
            raise UserError(
                f"{_subject(task)}: hooks at {point} need the loss; write batch.loss = "
                "all_reduce_mean(batch.local_loss.detach()) before they are called"
            )

    def end(self, task: Task) -> None:
        """Compare the batches that a step has read with those it has counted; warn of omissions.

        Raises:
            UserError: If it has read none, if the numbers differ, or if they are not
                ``train.accumulate`` for each counted step (fewer at the end of a phase).
        """
        if not self.remaining:
            return
        self.remaining -= 1
        if not self.remaining:
            for handle in self.handles:
                handle.remove()
        steps, batches = task.steps_done - self.before[0], task.clock.batch - self.before[1]
        if not self.reads:
            raise UserError(f"{_subject(task)} has read no batch; write {_READ}")
        if batches != self.reads:
            raise UserError(
                f"{_subject(task)} has read {_batches(self.reads)} and counted {batches}; end it "
                f"with task.advance({self.reads if self.reads > 1 else ''})"
            )
        accumulate = task.config.train.accumulate
        if batches != min(steps * accumulate, self.batches_left):
            raise UserError(
                f"{_subject(task)} has read {_batches(batches)}, and train.accumulate is "
                f"{accumulate}; read min(task.config.train.accumulate, task.batches_left) of them"
            )
        if not self.has_warned and (problem := self._omission(task, steps)):
            self.has_warned = True
            log.warning("%s: %s", _subject(task), problem)

    def end_phase(self, task: Task, stop: int) -> None:
        """Raise UserError unless the phase ends after batch ``stop``."""
        if task.clock.batch != stop:
            raise UserError(
                f"{_subject(task)}: the phase ended at batch {task.clock.batch} of {stop}; in a "
                "step, only the data may raise StopIteration, after task.batches_left batches, and "
                "a hook's wrap_batches must yield every batch"
            )

    def _omission(self, task: Task, steps: int) -> str:
        """Return what the step has left out or done too often, or an empty string."""
        if self.updates > steps:
            return (
                f"{self.updates} optimizer updates in a step that counts {steps}; schedules, "
                "epochs and teachers go by counted steps: make one update a step"
            )
        if not self.updates + self.other_updates:
            missing = "" if self.skips_updates else "task.optimizer.step(where=task.where)"
            return missing and f"no weights were updated; call {missing}"
        if not self.reductions:
            return (
                "weights were updated without task.reduce_gradients(), which averages gradients "
                "over ranks and drops those of frozen parameters; call it once after backward()"
            )
        missed = [
            point for point in STEP_POINTS if task.calls.get(point) and point not in self.points
        ]
        if missed and self.updates:
            calls = ", ".join(f'task.run_hooks("{point}")' for point in missed)
            return f"hooks of this run were not called; call {calls}"
        return ""


def _subject(task: Task) -> str:
    """Return name and place of the train step."""
    return f"train.step={task.config.train.step.name} ({source_of(task.train_step_function)})"


def _batches(number: int) -> str:
    return "1 batch" if number == 1 else f"{number} batches"
