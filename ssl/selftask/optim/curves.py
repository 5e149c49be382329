"""Functions of progress as Classy schedulers: a curve, a scaled curve, a sequence of curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from fvcore.common.param_scheduler import ExponentialParamScheduler, ParamScheduler

from selftask.classy import UpdateInterval, schedulers

Schedule = Callable[[float], Any]  # progress in [0, 1) -> value


class Curve(ParamScheduler):  # type: ignore[misc]  # fvcore ships no types
    """A function of progress as a Classy scheduler, evaluated at every step."""

    update_interval = UpdateInterval.STEP

    def __init__(self, function: Schedule) -> None:
        self.function = function

    def __call__(self, where: float) -> Any:
        return self.function(where)


class Scaled(Curve):
    """A schedule times a factor. It is hashable, so that equal parameter groups are merged."""

    def __init__(self, schedule: Any, factor: float) -> None:
        super().__init__(lambda where: schedule(where) * factor)
        self.schedule, self.factor = schedule, factor
        self.update_interval = schedule.update_interval

    def __eq__(self, other: object) -> bool:
        mine = (self.schedule, self.factor)
        return isinstance(other, Scaled) and mine == (other.schedule, other.factor)

    def __hash__(self) -> int:
        return hash((self.schedule, self.factor))


def join(
    parts: Sequence[Schedule], lengths: list[float], last: Literal["rescaled", "fixed"] = "rescaled"
) -> Any:
    """Return a sequence of schedules, each stretched over its fraction of the run.

    Args:
        parts: The schedules.
        lengths: Fraction of the run of each schedule; their sum is 1.
        last: ``fixed`` to make the last schedule a function of the progress of the whole run.
    """
    intervals = [*["rescaled"] * (len(parts) - 1), last]
    return schedulers.CompositeParamScheduler(parts, lengths, intervals)


def geometric(start: float, end: float) -> Schedule:
    """Return fvcore's exponential schedule from ``start`` to ``end``."""
    return Curve(ExponentialParamScheduler(start, end / start))
