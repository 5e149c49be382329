"""Recovery from NaN or infinity: repeat the steps since the last checkpoint."""

from __future__ import annotations

from selftask.checkpoint import rotation
from selftask.config.checks.locations import asked_checkpoint
from selftask.distributed.collectives import barrier
from selftask.hooks.base import Task
from selftask.hooks.failures.non_finite import NonFiniteGuard, NonFiniteLoss
from selftask.logs import get_logger

log = get_logger(__name__)

MOST_REPEATED = 1000  # maximum number of steps to repeat with ``stop``
_BUILT = (
    *("model", "base_model", "loss", "networks", "trained", "reduction", "reductions", "frozen"),
    *("optimizer", "optimizers", "all_optimizers", "step_check", "activations", "last_batch"),
    *("hooks", "named_hooks", "_wrappers", "_reduce"),
)
"""Attributes of a task that refer to its weights."""


def recover(task: Task, error: NonFiniteLoss) -> None:
    """Restart the task from its last checkpoint or its beginning, or raise the error.

    The repeated steps are checked one by one. With ``stop`` the first failing step raises the error
    again, with its cause and a dump. With ``rollback`` this step is skipped, along with the
    following batches up to the one at which the failure was detected, at most ``train.log_every``
    steps later.

    Every rank must call this function; the error occurs on all, since they have the same loss.

    Args:
        task: The task whose step failed.
        error: The failure.

    Raises:
        NonFiniteLoss: If ``train.on_nan`` is ``skip`` or the step was already checked, after
            ``train.nan_budget`` rollbacks, or with ``stop`` if the last checkpoint is more than
            1000 steps old.
    """
    policy, budget = task.config.train.on_nan, task.config.train.nan_budget
    checked = task.added_hooks.get("non_finite")
    is_repeated = isinstance(checked, NonFiniteGuard) and task.clock.batch <= checked.until
    if policy == "skip" or error.exact or (policy == "stop" and is_repeated):
        raise error
    if policy == "rollback" and task.rollbacks == budget:
        raise NonFiniteLoss(
            f"{error}; after {budget} rollbacks (train.nan_budget)", step=error.step
        ) from error
    task.checkpoints.finalize()
    barrier()
    saved = rotation.checkpoints(task.out / "checkpoints")
    begin = rotation.step_of(saved[0]) if saved else task.begun_at
    if policy == "stop" and error.step - begin > MOST_REPEATED:
        raise NonFiniteLoss(
            f"{error}; the last checkpoint is of step {begin}: the same command with "
            "train.on_nan=skip checks each step from there on and dumps this one",
            step=error.step,
        ) from error
    log.warning("%s", error)
    log.warning("going back to step %d, to repeat with a check in each step", begin)
    guard = NonFiniteGuard(policy, until=task.clock.batch, cause=error)
    guard.dumps = getattr(checked, "dumps", 0)
    task.rollbacks += policy == "rollback"
    _restart(task, guard, "auto" if saved else asked_checkpoint(task.config))


def _restart(task: Task, guard: NonFiniteGuard, checkpoint: str) -> None:
    """Rebuild all parts of the task and load the checkpoint."""
    task.on_exception()  # hooks restore what they have changed
    task.close()
    task.calls.clear()
    task.scalars.clear()
    task.before_export.clear()  # hooks add their changes again
    task.averages.clear()  # of weights after the checkpoint
    task.history.load_state_dict({})  # the repeated steps write their rows again
    for name in _BUILT:  # before they are built anew, since both may not fit into memory
        task.__dict__.pop(name, None)
    task.saved, task.resume_from = None, checkpoint
    task.added_hooks["non_finite"] = guard
    task.prepare()
    task.on_start()
