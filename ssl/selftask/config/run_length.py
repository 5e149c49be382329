"""Length and progress of a run, without torch.

A *step* is one optimizer update. It reads ``accumulate`` batches of ``batch_size`` samples, fewer
at the end of an epoch that does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selftask.config.schema import TrainConfig


@dataclass(frozen=True)
class RunLength:
    """The length of a run, from ``epochs``, ``max_steps`` or both: the shorter counts."""

    num_samples: int
    batch_size: int
    accumulate: int = 1
    epochs: float | None = None
    max_steps: int | None = None

    @classmethod
    def of(cls, train: TrainConfig, num_samples: int) -> RunLength:
        """Return the length of a run with this ``train:`` section and samples per epoch."""
        return cls(num_samples, train.batch_size, train.accumulate, train.epochs, train.max_steps)

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
        whole, rest = divmod(self.total_steps, self.steps_per_epoch)
        return whole * self.batches_per_epoch + min(rest * self.accumulate, self.batches_per_epoch)

    @property
    def num_epochs(self) -> int:
        """Number of train phases; the last one may be shorter."""
        return -(-self.total_steps // self.steps_per_epoch)


@dataclass
class Clock:
    """Progress of a run: the counters of a checkpoint."""

    length: RunLength
    steps_done: int = 0  # finished steps
    batch: int = 0  # global batches that have been read
    phase: int = 0  # finished phases, train and test
    skipped: int = 0  # global batches of skipped steps, which no schedule counts
    tested: int = 0  # `batch` at the last test phase
    stopped: str | None = None  # why training ends before its length; not part of the state

    @property
    def where(self) -> float:
        """Progress in [0, 1): every schedule is a function of it."""
        return min(self.trained_batches / self.length.total_batches, 1.0 - 1e-9)

    @property
    def trained_batches(self) -> int:
        """Number of global batches whose gradients are in the parameters."""
        return self.batch - self.skipped

    @property
    def where_of_epoch(self) -> float:
        """``where`` when this epoch began, without skipped steps: the same after a resume."""
        return min((self.batch - self.batch_in_epoch) / self.length.total_batches, 1.0 - 1e-9)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.batch // self.length.batches_per_epoch

    @property
    def batch_in_epoch(self) -> int:
        return self.batch % self.length.batches_per_epoch

    @property
    def done(self) -> bool:
        return self.batch >= self.length.total_batches or self.stopped is not None

    def test_is_due(self, every: int) -> bool:
        """Return whether a test phase comes next: after so many epochs, and at the end."""
        if self.batch == self.tested or not (self.batch_in_epoch == 0 or self.done):
            return False
        return self.done or self.epoch % every == 0

    def advance(self, batches: int = 1) -> None:
        """Count one finished step of ``batches`` batches."""
        self.steps_done += 1
        self.batch += batches

    def skip(self, batches: int = 1) -> None:
        """Count one skipped step: the data go on, ``where`` does not."""
        self.advance(batches)
        self.skipped += batches

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        batch, phase = state["batch"], state["phase"]
        older = {"skipped": 0, "tested": batch if phase % 2 == 0 else 0}  # runs without these
        state = {**older, **state}
        for name in _COUNTERS:
            setattr(self, name, state[name])


_COUNTERS = ("steps_done", "batch", "phase", "skipped", "tested")
