"""Recovery from NaN or infinity: repeat the steps since the last checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selftask.checkpoint import rotation
from selftask.distributed.collectives import barrier
from selftask.hooks.failures.non_finite import NonFiniteGuard, NonFiniteLoss
from selftask.logs import get_logger

if TYPE_CHECKING:
    from selftask.task.task import Task

log = get_logger(__name__)

MOST_REPEATED = 1000  # steps, to find the cause for ``stop``


def recover(task: Task, error: NonFiniteLoss) -> None:
    """Prepare the task again, from its last checkpoint or its beginning; or raise the error.

    The steps that are repeated are checked one by one. With ``stop`` the first that fails raises
    the error, now with its cause and a dump. With ``rollback`` it is left out, as are the batches
    from there to the one at which the failure was seen, at most ``train.log_every`` steps later.

    Every rank calls it, since the loss is the same on all of them.
    """
    policy, budget = task.config.train.on_nan, task.config.train.nan_budget
    if policy == "skip" or error.exact:
        raise error
    if policy == "rollback" and task.rollbacks == budget:
        raise NonFiniteLoss(
            f"{error}; after {budget} rollbacks (train.nan_budget)", step=error.step
        ) from error
    task.checkpoints.finalize()
    barrier()
    found = rotation.checkpoints(task.out / "checkpoints")
    begin = rotation.step_of(found[0]) if found else 0
    if policy == "stop" and error.step - begin > MOST_REPEATED:
        raise NonFiniteLoss(
            f"{error}; the last checkpoint is of step {begin}: the same command with "
            "train.on_nan=skip checks each step from there on and dumps this one",
            step=error.step,
        ) from error
    log.warning("%s", error)
    log.warning("going back to step %d, to repeat with a check in each step", begin)
    guard = NonFiniteGuard(policy, until=task.clock.batch, cause=error)
    task.rollbacks += policy == "rollback"
    _restart(task, guard, "auto" if found else None)


def _restart(task: Task, guard: NonFiniteGuard, checkpoint: str | None) -> None:
    """Build all parts of the task anew and load the checkpoint."""
    task.on_exception()  # hooks restore what they have changed
    task.close()
    task.calls.clear()
    task.scalars.clear()
    del task.model, task.base_model, task.loss, task.optimizer, task.last_batch  # frees memory
    task.saved, task.resume_from = None, checkpoint
    task.added_hooks["non_finite"] = guard
    task.prepare()
    task.on_start()
