"""NaN and infinity: the error, and the check of every step that finds their origin."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from selftask.batch import Batch
from selftask.data.source import Source
from selftask.distributed.collectives import all_reduce_sum, gather_objects
from selftask.errors import RunError, StepSkipped, join_some, plural
from selftask.hooks.base import Hook, Task
from selftask.hooks.failures.dump import dump
from selftask.logs import get_logger
from selftask.optim.gradients import local_parts, to_one_device
from selftask.random import process_state

log = get_logger(__name__)

MOST_DUMPS = 3  # per run
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
INTACT = "checkpoints before this are intact"
REMEDY = "Try a lower optimizer.lr, a longer optimizer.warmup or train.precision=float32; " + INTACT
IMAGES_REMEDY = f"Look at the images that the replay lists, and at the transforms; {INTACT}"


class NonFiniteLoss(RunError, FloatingPointError):
    """Error: the loss or a gradient became NaN or infinite. No checkpoint contains such a state.

    Args:
        message: Description of the value and its location.
        step: The first step known to be affected.
        exact: Whether all earlier steps were checked, including their gradients.
    """

    def __init__(self, message: str, *, step: int, exact: bool = False) -> None:
        super().__init__(message)
        self.step, self.exact = step, exact


class NonFiniteGuard(Hook):
    """Checks loss and gradients in each step, before the weights are updated.

    The host waits for the device twice per step. BatchNorm's running statistics of a skipped step
    are restored. The first three failures of a run are dumped in ``failures/step_N/``. Gradients
    are not checked if there is a loss scaler, which has its own check.

    Args:
        policy: ``train.on_nan``. ``skip`` checks the whole run. The other policies check only while
            the run repeats the steps since its last checkpoint: ``stop`` raises the exact cause;
            ``rollback`` skips the affected step and all later repeated steps.
        budget: Maximum number of consecutive steps that ``skip`` may skip.
        until: Number of the first global batch that is not repeated; 0 for ``skip``.
        cause: The error that led to the repetition; None for ``skip``.
    """

    priority: ClassVar[int] = 65  # after hooks that change the loss, before it is logged

    def __init__(
        self,
        policy: Literal["stop", "skip", "rollback"],
        *,
        budget: int = 0,
        until: int = 0,
        cause: NonFiniteLoss | None = None,
    ) -> None:
        self.policy, self.budget, self.until, self.cause = policy, budget, until, cause
        self.in_row = 0  # consecutive steps skipped
        self.dumps = 0
        self.has_failed = False

    def checks(self, task: Task) -> bool:
        """Return True if the step in progress is a train step to check."""
        return task.train and (self.policy == "skip" or task.clock.batch < self.until)

    def before_step(self, task: Task) -> None:
        if self.checks(task):
            self.rng = process_state.rng_state()
            self.kept = [(buffer, buffer.clone()) for buffer in _statistics(task)]

    def on_forward(self, task: Task) -> None:
        if self.policy == "rollback" and self.has_failed and self.checks(task):
            _restore(self.kept)
            raise StepSkipped

    def on_loss_and_meter(self, task: Task) -> None:
        loss = task.last_batch.loss
        if self.checks(task) and loss is not None and not math.isfinite(loss):
            self._handle(task, f"the loss is {float(loss)}", _cause_in(task))

    def on_backward(self, task: Task) -> None:
        if not self.checks(task) or task.grad_scaler.is_enabled():  # the scaler has its own check
            return
        bad = _non_finite(task, lambda parameter: parameter.grad)
        if _on_any_rank(task, bad):
            loss = float(task.last_batch.loss)  # type: ignore[arg-type]
            problem = f"the gradient is not finite, and the loss is {loss:.4g},"
            self._handle(task, problem, Cause(0, bad[0]) if bad else None)

    def on_update(self, task: Task) -> None:
        self.in_row = 0

    def on_step(self, task: Task) -> None:
        if self.cause is None or task.clock.batch < self.until:
            return
        cause, self.cause = self.cause, None
        if not self.has_failed:
            text = f"{cause}; all was finite when the steps were repeated, so look at the hardware"
            if self.policy == "stop":
                raise NonFiniteLoss(text, step=cause.step, exact=True)
            log.warning("%s", text)

    def _handle(self, task: Task, problem: str, here: Cause | None) -> None:
        """Restore BatchNorm, dump the step; raise NonFiniteLoss or StepSkipped on every rank."""
        _restore(self.kept)
        self.has_failed = True
        self.in_row += 1
        step, (text, remedy) = task.steps_done + 1, describe(task, problem, here)
        if self.dumps < MOST_DUMPS:
            self.dumps += 1
            folder = shlex.quote(str(dump(task, text, self.rng)))
            text = f"{text}; selftask replay {folder} repeats the step"
        if self.policy == "stop" or (self.policy == "skip" and self.in_row > self.budget):
            before = f", after {self.budget} skipped steps" if self.policy == "skip" else ""
            raise NonFiniteLoss(f"{text}{before}. {remedy}", step=step, exact=True)
        log.warning("%s; the step is skipped (train.on_nan=%s)", text, self.policy)
        raise StepSkipped

    def state_dict(self) -> dict[str, Any]:
        if self.policy != "skip":  # a resume has no such hook
            return {}
        return {"in_row": self.in_row, "dumps": self.dumps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_row, self.dumps = state.get("in_row", 0), state.get("dumps", self.dumps)


class Cause(NamedTuple):
    """Non-finite value on a rank; a smaller ``order`` is earlier in the step."""

    order: int
    text: str
    remedy: str = REMEDY


def describe(task: Task, problem: str, here: Cause | None) -> tuple[str, str]:
    """Return a description with step, ranks, cause and learning rate, and advice to the user.

    Every rank must call this function. Only the ranks with the earliest cause are named, since
    gathered batches spread NaN to all ranks.

    Args:
        task: The task, in the step.
        problem: The problem, the same on every rank.
        here: The cause on this rank, if any.
    """
    causes: list[Cause | None] = gather_objects(here)
    first = min((cause.order for cause in causes if cause), default=None)
    ranks = [rank for rank, cause in enumerate(causes) if cause and cause.order == first]
    earliest = causes[ranks[0]] if ranks else None
    cause, remedy = (f": {earliest.text}", earliest.remedy) if earliest else ("", REMEDY)
    lr = task.optimizer.param_groups[0]["lr"]
    step = task.steps_done + 1
    listed = ", ".join(map(str, ranks[:8])) or ("0" if len(causes) == 1 else "unknown")
    named = f"{plural('rank', len(ranks) or 1)} {listed}"
    return f"{problem} at step {step} on {named}{cause}; lr was {lr:.3g}", remedy


def _cause_in(task: Task) -> Cause | None:
    """Return the first non-finite part of this rank's batch, or None."""
    batch = task.last_batch
    for text in non_finite_images(batch, task.data_module.train_source):
        return Cause(0, f"its images are not finite ({text})", IMAGES_REMEDY)
    if not is_finite(batch.output):
        return Cause(1, "the output of the network is not finite")
    bad = [name for name, term in batch.terms.items() if not is_finite(term)]
    if bad:
        return Cause(2, f"{plural('term', len(bad))} {', '.join(bad)} of finite outputs")
    if not is_finite(batch.local_loss.detach()):
        return Cause(2, "the loss of finite outputs")
    return None


def non_finite_images(batch: Batch, source: Source) -> Iterator[str]:
    """Yield ``view GROUP[NUMBER] of PATHS`` for each view with non-finite images.

    Args:
        batch: The batch.
        source: The source of its images, which gives their paths; a few are listed.
    """
    for name, views in batch.views.items():
        for number, view in enumerate(views):
            bad = (~view.isfinite()).flatten(1).any(dim=1)
            if bad.any():
                paths = [source.path(index) for index in batch.index[bad].tolist()]
                yield f"view {name}[{number}] of {join_some(paths)}"


def is_finite(value: Any) -> bool:
    """Return True if all tensors in nested tuples, lists and dicts are finite.

    Other values are not checked.
    """
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def check_weights(task: Task) -> None:
    """Raise NonFiniteLoss on every rank if a step has made a trained weight NaN or infinite.

    The loss shows this one step later. Every rank must call this function.
    """
    bad = _non_finite(task, lambda parameter: parameter if parameter.requires_grad else None)
    if _on_any_rank(task, bad):
        step, lr = task.steps_done, task.optimizer.param_groups[0]["lr"]
        named = f": {join_some(bad)}" if bad else ""
        raise NonFiniteLoss(
            f"weights are not finite after step {step}{named}; lr was {lr:.3g}. {REMEDY}", step=step
        )


def _non_finite(task: Task, part_of: Callable[[nn.Parameter], Tensor | None]) -> list[str]:
    """Return the names of the parameters with a non-finite part, such as their gradient, here."""
    named = [
        (name, value)
        for part, module in task.trained
        for name, parameter in module.named_parameters(part)
        if (value := part_of(parameter)) is not None
    ]
    parts = local_parts([value for _, value in named])
    if not parts:
        return []
    finite = torch.stack(to_one_device(part.isfinite().all() for part in parts)).tolist()
    return [name for (name, _), good in zip(named, finite, strict=True) if not good]


def _on_any_rank(task: Task, bad: list[str]) -> bool:
    return bool(all_reduce_sum(torch.tensor(float(len(bad)), device=task.device)))


def _statistics(task: Task) -> Iterator[Tensor]:
    for module in (task.base_model, task.loss):
        for name, buffer in module.named_buffers():
            if name.rpartition(".")[2] in STATISTICS:
                yield buffer


@torch.no_grad()
def _restore(kept: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in kept:
        buffer.copy_(before)
