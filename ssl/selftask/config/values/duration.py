"""Lengths of training: ``10 epochs``, ``500 steps``, ``5%``, or a number of steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from selftask.config.run_length import RunLength

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(epochs?|steps?|%)?\s*")


@dataclass(frozen=True)
class Duration:
    """Length of ``value`` epochs, steps or percent of the whole training."""

    value: float
    unit: Literal["epoch", "step", "%"]

    def steps(self, steps_per_epoch: int, total_steps: int) -> int:
        """Return the length in optimizer steps, rounded to the nearest integer."""
        unit_steps = {"epoch": steps_per_epoch, "step": 1, "%": total_steps / 100}[self.unit]
        return round(self.value * unit_steps)


def parse_duration(text: str | int) -> Duration:
    """Parse ``10 epochs``, ``0.5 epoch``, ``500 steps``, ``5%`` or a number of steps.

    Raises:
        ValueError: For any other text, more than 100 %, and a number of steps that is not whole.
    """
    match = None if isinstance(text, bool) else _PATTERN.fullmatch(str(text))
    if match is None:
        raise ValueError(
            "not a duration: write '10 epochs', '500 steps', '5%' or a number of steps"
        )
    value, word = float(match[1]), match[2] or "step"
    if word == "%":
        if value > 100:
            raise ValueError(f"{value:g}% is more than the whole training")
        return Duration(value, "%")
    unit: Literal["epoch", "step"] = "epoch" if word.startswith("epoch") else "step"
    if unit == "step" and value != int(value):
        raise ValueError(f"steps are whole: {value:g} is not")
    return Duration(value, unit)


def intervals_in(
    every: int | str | Mapping[str, int | str] | None, length: RunLength
) -> list[tuple[int, int]]:
    """Return pairs (first step, interval in steps), sorted, as ``interval_at`` reads them.

    Intervals are at least 1 step.

    Args:
        every: An interval, or a mapping from a time to the interval from then on. None: no pairs.
        length: Length of the run.
    """
    if every is None:
        return []
    by_time = every if isinstance(every, Mapping) else {"0": every}
    return sorted((steps_in(t, length), max(1, steps_in(n, length))) for t, n in by_time.items())


def interval_at(step: int, intervals: Sequence[tuple[int, int]]) -> int:
    """Return the interval in steps that applies at a step, or 0 before the first one.

    Args:
        step: Number of the step.
        intervals: Result of ``intervals_in``.
    """
    for first, interval in reversed(intervals):
        if first <= step:
            return interval
    return 0


def steps_in(text: str | int, length: RunLength) -> int:
    """Return a duration such as ``10 epochs`` in steps, for a run of the given length."""
    return parse_duration(text).steps(length.steps_per_epoch, length.total_steps)
