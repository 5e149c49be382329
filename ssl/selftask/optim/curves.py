"""Functions of progress as Classy schedulers: a curve, a scaled curve, a sequence of curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, SupportsFloat

from fvcore.common.param_scheduler import ExponentialParamScheduler, ParamScheduler

from selftask.classy import UpdateInterval, schedulers
from selftask.config.extensions.user_code import source_of
from selftask.errors import UserError

Schedule = Callable[[float], Any]  # progress in [0, 1) -> value


class Curve(ParamScheduler):  # type: ignore[misc]  # fvcore ships no types
    """A function of progress as a Classy scheduler, evaluated at every step.

    Args:
        function: The function.
        make: Returns the function. It is pickled instead of a function that is a local one.
    """

    update_interval = UpdateInterval.STEP

    def __init__(self, function: Schedule, make: Callable[[], Schedule] | None = None) -> None:
        self.function, self.make = function, make

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.make is None:
            return super().__reduce_ex__(protocol)
        state = {name: value for name, value in vars(self).items() if name != "function"}
        return _made, (self.make,), state

    def __call__(self, where: float) -> Any:
        return self.function(where)


def checked(function: Any, origin: Callable[..., Any]) -> Any:
    """Return what a schedule's ``curve`` (``origin``) returned, a function of progress.

    Raises:
        UserError: If it is not a function, or its value at 0 is not a number.
    """
    wrong = None
    if not callable(function):
        wrong = f"{function!r:.80}"
    elif not isinstance(value := function(0.0), SupportsFloat):
        wrong = f"a function with the value {value!r:.80} at 0"
    if wrong is not None:
        raise UserError(
            f"{source_of(origin)}: the curve of a schedule returned {wrong}; expected a function "
            "of progress in [0, 1) that returns a number"
        )
    return function


def _made(make: Callable[[], Schedule]) -> Curve:
    return Curve(make(), make)


class Scaled(Curve):
    """A schedule times a factor; equal to another one if schedule and factor are equal.

    Parameter groups with equal settings can thus be merged.
    """

    def __init__(self, schedule: Any, factor: float) -> None:
        super().__init__(partial(_times, factor, schedule))
        self.schedule, self.factor = schedule, factor
        self.update_interval = schedule.update_interval

    def __eq__(self, other: object) -> bool:
        mine = (self.schedule, self.factor)
        return isinstance(other, Scaled) and mine == (other.schedule, other.factor)

    def __hash__(self) -> int:
        return hash((self.schedule, self.factor))


def _times(factor: float, schedule: Schedule, where: float) -> Any:
    return schedule(where) * factor


def join(
    parts: Sequence[Schedule], lengths: list[float], last: Literal["rescaled", "fixed"] = "rescaled"
) -> Any:
    """Return a sequence of schedules, each stretched over its fraction of the run.

    Args:
        parts: The schedules.
        lengths: Fraction of the run of each schedule; their sum is 1.
        last: ``rescaled`` to stretch the last schedule like the others; ``fixed`` to evaluate it
            at the progress of the whole run.
    """
    intervals = [*["rescaled"] * (len(parts) - 1), last]
    return schedulers.CompositeParamScheduler(parts, lengths, intervals)


def geometric(start: float, end: float) -> Schedule:
    """Return fvcore's exponential schedule from ``start`` to ``end``."""
    return Curve(ExponentialParamScheduler(start, end / start))
