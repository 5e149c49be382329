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
    epochs: int | None = None
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
        by_epochs = None if self.epochs is None else self.epochs * self.steps_per_epoch
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
    batch: int = 0  # global batches whose gradients are in the parameters
    phase: int = 0  # finished phases, train and test

    @property
    def where(self) -> float:
        """Progress in [0, 1): every schedule is a function of it."""
        return min(self.batch / self.length.total_batches, 1.0 - 1e-9)

    @property
    def where_of_epoch(self) -> float:
        """``where`` as it was when this epoch began: the same before and after a resume."""
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
        return self.batch >= self.length.total_batches

    def state_dict(self) -> dict[str, int]:
        return {"steps_done": self.steps_done, "batch": self.batch, "phase": self.phase}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps_done, self.batch, self.phase = (
            state[name] for name in ("steps_done", "batch", "phase")
        )
