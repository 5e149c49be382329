"""The ``eval`` section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import Component, Section
from selftask.config.values.duration import steps_in

if TYPE_CHECKING:
    from selftask.config.run_length import RunLength


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Evaluations of the frozen backbone during training."""

    transforms: list[Component] = setting([], of="transforms")
    """Transforms of evaluated images. Random ones have the same draws for an image each time."""
    evaluations: dict[str, Component] = setting({}, of="evaluations")
    """Evaluations by name, such as ``{knn: {k: [20]}}``."""
    every: int | str | dict[str, int | str] | None = setting(None, duration=True, min=1)
    """Time between evaluations, which may change: ``{0: 10 epochs, 80%: 1 epoch}``. There is also
    one at step 0 and at the end; null: only these.
    """
    start: int | str = setting(0, duration=True, also=["val_begin"])
    """Time before which there is no evaluation and no test phase, except at the end of the run; 0:
    the first evaluation is at step 0.
    """
    loss: bool = setting(False, also=["val_loss", "validation_loss"])
    """Whether evaluations include the method's own loss on ``data.val`` and ``data.val_sets``, with
    the views of training, as ``val_loss``.
    """
    test_every: int = setting(1, min=1, also=["test_phase_period", "val_interval"])
    """Train phases between test phases with meters; the run also ends with a test phase. A train
    phase is an epoch unless ``train.phases_per_epoch`` divides it.
    """
    layers: list[int] = setting([])
    """Indices of hidden layers to evaluate, -1 for the last; empty: the backbone's output."""
    pool: Literal["mean", "prefix", "both"] = "mean"
    """Features from the tokens of a hidden layer: mean of the patch tokens, prefix tokens (class
    token, registers), or both.
    """
    flip: bool = setting(False, also=["tta"])
    """Whether features are averaged over each image and its mirror image."""
    scales: list[float] = setting([1.0], above=0)
    """Image sizes whose features are averaged, relative to those of ``transforms``, such as
    ``[0.75, 1, 1.25]``.
    """

    def phases_to_test(self, length: RunLength) -> int:
        """Return the number of train phases before the first test phase.

        It is a multiple of ``test_every``, and the run may end before it.
        """
        start = min(steps_in(self.start, length), length.total_steps) / length.steps_per_epoch
        cycles = start * length.phases_per_epoch / self.test_every
        return self.test_every * max(1, math.ceil(cycles - 1e-9))
