"""Length and progress of a run, without torch.

A *step* is one optimizer update. It reads ``accumulate`` batches of ``batch_size`` samples. The
last step of an epoch reads fewer batches if their number is not a multiple of ``accumulate``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from selftask.config.values.duration import steps_in
from selftask.errors import UserError, plural

if TYPE_CHECKING:
    from selftask.config.schema import TrainConfig


@dataclass(frozen=True)
class RunLength:
    """Length of a run, given by ``epochs``, ``max_steps`` or the shorter of both.

    An epoch has ``num_samples`` samples in global batches of ``batch_size``; a last partial batch
    is dropped.
    """

    num_samples: int
    batch_size: int
    accumulate: int = 1
    epochs: float | None = None
    max_steps: int | None = None
    phases_per_epoch: int = 1  # train phases, whose lengths differ by at most one step

    @classmethod
    def of(cls, train: TrainConfig, num_samples: int) -> RunLength:
        """Return the length of a run with this ``train:`` section and samples per epoch.

        Raises:
            UserError: If an epoch has fewer steps than phases.
        """
        lengths = (train.epochs, train.max_steps, train.phases_per_epoch)
        length = cls(num_samples, train.batch_size, train.accumulate, *lengths)
        if length.phases_per_epoch > max(length.steps_per_epoch, 1):
            steps = length.steps_per_epoch
            raise UserError(
                f"train.phases_per_epoch={length.phases_per_epoch}: an epoch has {steps} "
                f"{plural('step', steps)}, and a phase at least one; set it to {steps} or less"
            )
        return length

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.accumulate

    @cached_property
    def batches_per_epoch(self) -> int:
        return self.num_samples // self.batch_size  # the last partial batch is dropped

    @cached_property
    def steps_per_epoch(self) -> int:
        return -(-self.batches_per_epoch // self.accumulate)

    @cached_property
    def total_steps(self) -> int:
        epochs, length = self.epochs, self.steps_per_epoch
        by_epochs = None if epochs is None else max(1, round(epochs * length))
        bounds = [bound for bound in (by_epochs, self.max_steps) if bound is not None]
        return min(bounds)

    @cached_property
    def total_batches(self) -> int:
        epochs, rest = divmod(self.total_steps, self.steps_per_epoch)
        return epochs * self.batches_per_epoch + min(rest * self.accumulate, self.batches_per_epoch)

    @property
    def num_epochs(self) -> int:
        """Number of epochs; the last one may be shorter."""
        return -(-self.total_steps // self.steps_per_epoch)

    def phases_before(self, batch: int) -> int:
        """Return the number of train phases that end before a batch, whose number counts from 0."""
        epoch, inside = divmod(batch, self.batches_per_epoch)
        steps = (inside // self.accumulate + 1) * self.phases_per_epoch
        return epoch * self.phases_per_epoch - (-steps // self.steps_per_epoch) - 1

    def first_batch(self, phase: int) -> int:
        """Return the number of the first batch of a train phase; both are counted from 0."""
        epoch, part = divmod(phase, self.phases_per_epoch)
        step = part * self.steps_per_epoch // self.phases_per_epoch
        return epoch * self.batches_per_epoch + step * self.accumulate


@dataclass
class Clock:
    """Progress of a run: counters that are saved in checkpoints."""

    length: RunLength
    steps_done: int = 0  # finished steps
    batch: int = 0  # global batches that have been read
    phase: int = 0  # finished phases, train and test
    skipped: int = 0  # global batches of skipped steps, which schedules do not count
    tested: int = 0  # `batch` at the last test phase
    stopped: str | None = None  # why training ends before its length; not part of the state
    in_step: bool = False  # whether a step has begun that is not counted yet; not part of the state

    @property
    def where(self) -> float:
        """Progress in [0, 1), the argument of every schedule."""
        return min(self.trained_batches / self.length.total_batches, 1.0 - 1e-9)

    @property
    def step(self) -> int:
        """Number of the step in progress, or else of the last one, from 1; 0 before the first."""
        return self.steps_done + self.in_step

    @property
    def trained_batches(self) -> int:
        """Number of global batches whose gradients are in the parameters."""
        return self.batch - self.skipped

    @property
    def where_of_epoch(self) -> float:
        """Progress at the start of this epoch, in [0, 1).

        Unlike ``where`` it counts skipped steps, so that all steps of an epoch have one value.
        """
        return min((self.batch - self.batch_in_epoch) / self.length.total_batches, 1.0 - 1e-9)

    @property
    def epoch(self) -> int:
        """Index of the epoch of the next batch, from 0."""
        return self.batch // self.length.batches_per_epoch

    @property
    def batch_in_epoch(self) -> int:
        return self.batch % self.length.batches_per_epoch

    @property
    def done(self) -> bool:
        return self.batch >= self.length.total_batches or self.stopped is not None

    @property
    def between_phases(self) -> bool:
        """True if the next batch is the first of a train phase."""
        return self.batch == self.length.first_batch(self.length.phases_before(self.batch))

    @property
    def batches_left(self) -> int:
        """Number of remaining batches of the train phase, or of the run if it ends before.

        It is never 0, so that a train step requests another batch and thus notices the end of the
        phase.
        """
        end = self.length.first_batch(self.length.phases_before(self.batch) + 1)
        if self.batch < self.length.total_batches:
            end = min(end, self.length.total_batches)
        return end - self.batch

    @property
    def ends_epoch(self) -> bool:
        """True in ``on_step`` if the step was the last of its epoch or of the run."""
        return self.batch_in_epoch == 0 or self.batch >= self.length.total_batches

    @property
    def in_last_epoch(self) -> bool:
        """True in ``on_step`` if the step belongs to the last epoch."""
        return (self.batch - 1) // self.length.batches_per_epoch == self.length.num_epochs - 1

    def every(self, period: int | str, start: int | str = 0) -> bool:
        """Return True in ``on_step`` if the step is the last of a period.

        Args:
            period: Length of a period, such as ``10 epochs``, ``5%`` or a number of steps.
            start: Time at which the first period starts, in the same forms.
        """
        steps = self.steps_done - steps_in(start, self.length)
        return steps > 0 and steps % max(1, steps_in(period, self.length)) == 0

    def test_is_due(self, every: int, first: int = 1) -> bool:
        """Return whether a test phase is next.

        There is one after every ``every`` train phases, once ``first`` of them are done, and at the
        end of the run.
        """
        if self.batch == self.tested or not (self.between_phases or self.done):
            return False
        phases = self.length.phases_before(self.batch)
        return self.done or (phases >= first and phases % every == 0)

    def advance(self, batches: int = 1) -> None:
        """Count one finished step of ``batches`` batches."""
        self.steps_done += 1
        self.batch += batches
        self.in_step = False

    def skip(self, batches: int = 1) -> None:
        """Count one skipped step, which consumes its batches but does not advance ``where``."""
        self.advance(batches)
        self.skipped += batches

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state[name])


_COUNTERS = ("steps_done", "batch", "phase", "skipped", "tested")
