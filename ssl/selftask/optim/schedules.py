"""Schedules: pure functions of progress ``where`` in [0, 1), without state.

Schedulers of Classy Vision and fvcore are used for the shapes that they offer. Learning rates that
depend on a metric are set by the hook ``plateau``.
"""

from __future__ import annotations

import bisect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from fvcore.common.param_scheduler import ParamScheduler

from selftask import classy
from selftask.classy import UpdateInterval, schedulers
from selftask.config.fields import setting
from selftask.config.run_length import RunLength
from selftask.config.values.duration import parse_duration, steps_in
from selftask.errors import UserError
from selftask.optim.curves import Curve, Schedule, checked, geometric, join
from selftask.registry import SCHEDULES, register_schedule

_EPSILON = 1e-9  # fraction of a run; tolerance for rounding errors of progress


@dataclass(frozen=True)
class Span:
    """The part of a run over which a schedule extends: after the warm-up, or the whole run."""

    length: RunLength
    warmup: float = 0.0  # fraction of the run

    def whole(self, progress: float) -> float:
        """Convert progress within this part to progress of the whole run."""
        return self.warmup + progress * (1.0 - self.warmup)

    def fraction(self, duration: int | str) -> float:
        """Return a duration, counted from the start of the run, as a fraction of the run."""
        return steps_in(duration, self.length) / self.length.total_steps


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Base class of schedules, with common fields and the warm-up.

    A subclass implements ``curve``. Durations in its own fields are measured from the start of the
    run, including the warm-up.
    """

    start: float | None = setting(None, also=["start_value", "base_value", "value"])
    """Value after the warm-up; for the learning rate, ``optimizer.lr``."""
    end: float | None = setting(None, also=["end_value"])
    """Value at the end of the run."""
    warmup: int | str = setting(0, duration=True)
    """Length of the warm-up, such as ``10 epochs``; a number is steps; 0: none."""
    warmup_start: float = 0.0
    """Value at the start of the warm-up."""
    warmup_shape: Literal["linear", "cosine", "exponential", "constant"] = "linear"
    """Shape of the warm-up, which begins at ``warmup_start``; constant: it stays there."""
    warmup_interval: Literal["rescaled", "fixed", "jump"] = "rescaled"
    """Position of the schedule relative to the warm-up. rescaled: it starts after the warm-up.
    fixed: it extends over the whole run, and the warm-up rises to the schedule's value at the end
    of the warm-up. jump: the same, but the warm-up rises to ``start``, as in timm.
    """
    zero_until: int | str = setting(0, duration=True)
    """Time until which the value is 0, as for a layer that is frozen by its learning rate."""
    update: Literal["step", "epoch"] = setting("step", also=["update_interval", "by_epoch"])
    """Whether the value changes at each step or once per epoch."""

    needs_end = True

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.start is None:
            yield "start is missing: the value at the start of training, or after the warm-up"
        if self.end is None and self.needs_end:
            yield "end is missing: the value at the end of training"
        if self.warmup_shape == "exponential" and self.warmup and not self.warmup_start > 0:
            yield f"warmup_start: {self.warmup_start:g}; must be above 0 to rise exponentially"

    @abstractmethod
    def curve(self, start: float, end: float, span: Span) -> Schedule:
        """Return the value as a function of progress in [0, 1) within ``span``.

        Args:
            start: Value of the field ``start``.
            end: Value of the field ``end``, or ``start`` if that is None.
            span: Part of the run over which the schedule extends; it converts durations.
        """

    def build(self, length: RunLength) -> Any:
        """Return a Classy scheduler; raise UserError if the durations do not fit into the run."""
        start = 0.0 if self.start is None else self.start
        warmup = min(steps_in(self.warmup, length) / length.total_steps, 1.0)
        fixed = self.warmup_interval != "rescaled"
        if warmup == 1.0 and not fixed:
            schedule = self._rise(start)
        else:
            span = Span(length, 0.0 if fixed else warmup)
            make = partial(self.curve, start, start if self.end is None else self.end, span)
            after = checked(make(), self.curve)
            schedule = after if isinstance(after, ParamScheduler) else Curve(after, make)
            if warmup > 0.0:
                rise = self._rise(schedule(warmup) if self.warmup_interval == "fixed" else start)
                lengths = [warmup, 1.0 - warmup]
                schedule = join([rise, schedule], lengths, "fixed" if fixed else "rescaled")
        if zeros := steps_in(self.zero_until, length) / length.total_steps:
            schedule = Curve(partial(_after, zeros, schedule))
        if self.update == "epoch":
            schedule.update_interval = UpdateInterval.EPOCH
        return schedule

    def _rise(self, start: float) -> Any:
        return _RISES[self.warmup_shape](self.warmup_start, start)


def _after(zeros: float, schedule: Schedule, where: float) -> float:
    return float(schedule(where)) if where + _EPSILON >= zeros else 0.0


_RISES: dict[str, Callable[[float, float], Any]] = {
    "linear": schedulers.LinearParamScheduler,
    "cosine": schedulers.CosineParamScheduler,
    "exponential": geometric,
    "constant": lambda start, end: schedulers.ConstantParamScheduler(start),
}
"""Shapes of the warm-up; ``constant`` keeps the start value, then jumps."""


@register_schedule("constant")
@dataclass(frozen=True, kw_only=True)
class Constant(ScheduleConfig):
    """Constant at the start value."""

    needs_end = False

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        return schedulers.ConstantParamScheduler(start)


@register_schedule("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(ScheduleConfig):
    """Linear interpolation from start to end."""

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        return schedulers.LinearParamScheduler(start, end)


@register_schedule("cosine")
@dataclass(frozen=True, kw_only=True)
class Cosine(ScheduleConfig):
    """Half a cosine from start to end, with optional restarts (SGDR, arXiv:1608.03983)."""

    restarts: int = setting(0, min=0, max=1000)
    """Number of restarts of the half cosine; 0: none."""
    growth: float = setting(1.0, above=0)
    """Ratio of the lengths of successive cycles, T_mult."""
    stretch: float = setting(1.0, min=1, also=["ipe_scale"])
    """End of the half cosine as a multiple of the run's length. At 1.25, without a warm-up, the run
    ends after four fifths of the half cosine, before ``end`` is reached.
    """

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        yield from super().problems(config)
        if self.restarts and self.stretch != 1:
            yield f"stretch: {self.stretch:g}; has no effect with restarts: leave one of them out"

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        half = schedulers.CosineParamScheduler(start, end)
        if self.stretch != 1:
            share = (1.0 - span.warmup) / (self.stretch - span.warmup)
            return lambda where: half(where * share)
        if not self.restarts:
            return half
        lengths = [self.growth**cycle for cycle in range(self.restarts + 1)]
        return join([half] * len(lengths), [cycle / sum(lengths) for cycle in lengths])


@register_schedule("exponential")
@dataclass(frozen=True, kw_only=True)
class Exponential(ScheduleConfig):
    """Exponential decay from start to end."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        yield from super().problems(config)
        if self.start is not None and self.end is not None and not min(self.start, self.end) > 0:
            yield f"exponential: from {self.start:g} it cannot end at {self.end:g}; end above 0"

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        return geometric(start, end)


@register_schedule("polynomial")
@dataclass(frozen=True, kw_only=True)
class Polynomial(ScheduleConfig):
    """Polynomial decay: ``end + (start - end) * (1 - progress) ** power``, after the warm-up."""

    power: float = setting(above=0)
    """Exponent; 0.9 in DeepLab, 1 is linear."""

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        decay = schedulers.PolynomialDecayParamScheduler(start - end, self.power)
        return lambda where: end + decay(where)


@register_schedule("step")
@dataclass(frozen=True, kw_only=True)
class Step(ScheduleConfig):
    """Start value, multiplied by ``factor`` at equal intervals, like torch's StepLR."""

    needs_end = False

    every: int | str = setting(duration=True, also=["step_size"])
    """Time between reductions, counted from the start of the run."""
    factor: float = setting(0.1, above=0, also=["gamma"])
    """Factor at each reduction."""

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        every = span.fraction(self.every)
        if not every:
            raise UserError(f"schedule step: every={self.every!r} is less than a step of this run")
        return lambda where: start * self.factor ** int((span.whole(where) + _EPSILON) / every)


@register_schedule("multistep")
@dataclass(frozen=True, kw_only=True)
class MultiStep(ScheduleConfig):
    """Start value, multiplied by ``factor`` at each milestone, like torch's MultiStepLR."""

    needs_end = False

    milestones: list[int | str]
    """Times of the reductions from the start of the run, such as [60 epochs, 80 epochs]."""
    factor: float = setting(0.1, above=0, also=["gamma"])
    """Factor at each milestone."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        yield from super().problems(config)
        yield from milestone_problems(self.milestones)

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        milestones = sorted(span.fraction(milestone) for milestone in self.milestones)
        return lambda where: (
            start * self.factor ** bisect.bisect_right(milestones, span.whole(where) + _EPSILON)
        )


@register_schedule("inverse_sqrt")
@dataclass(frozen=True, kw_only=True)
class InverseSqrt(ScheduleConfig):
    """``start * sqrt(warmup / step)`` from the end of the warm-up (arXiv:1706.03762, sec. 5.3)."""

    needs_end = False

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        yield from super().problems(config)
        if not parse_duration(self.warmup).value:
            yield "warmup: 0; inverse_sqrt decays from the end of a warm-up"
        if self.warmup_interval != "rescaled":
            interval = self.warmup_interval
            yield f"warmup_interval: {interval!r}; inverse_sqrt begins after it: 'rescaled'"

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        return lambda where: start * math.sqrt(span.warmup / span.whole(where))


@register_schedule("one_cycle")
@dataclass(frozen=True, kw_only=True)
class OneCycle(ScheduleConfig):
    """Half a cosine from ``first`` to start, then another one to end, like torch's OneCycleLR.

    Smith and Topin, Super-Convergence, arXiv:1708.07120. A momentum uses the opposite course:
    ``sgd_momentum: {name: one_cycle, first: 0.95, start: 0.85, end: 0.95}``.
    """

    first: float | None = None
    """Value at the first step; null: start / 25."""
    rise: int | str = setting("30%", duration=True, also=["pct_start"])
    """Duration of the rise from ``first`` to ``start``."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        yield from super().problems(config)
        if parse_duration(self.warmup).value:
            yield f"warmup: {self.warmup}; one_cycle has its own, `rise`: set the warm-up to 0"

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        first = start / 25 if self.first is None else self.first
        rise, fall = (schedulers.CosineParamScheduler(*p) for p in ((first, start), (start, end)))
        share = min(span.fraction(self.rise), 1.0)
        return {0.0: fall, 1.0: rise}.get(share) or join([rise, fall], [share, 1.0 - share])


@register_schedule("wsd")
@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(ScheduleConfig):
    """Warm-up, constant, then a cooldown to end (WSD; Haegele et al., arXiv:2405.18392)."""

    cooldown: int | str = setting("20%", duration=True)
    """Duration of the cooldown, at the end of the run."""
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the cooldown; sqrt: 1 - sqrt(p) at progress p of the cooldown."""

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        cooldown = span.fraction(self.cooldown)
        stable = 1.0 - cooldown / max(1.0 - span.warmup, _EPSILON)
        if not 0.0 <= stable < 1.0:
            raise UserError(
                f"schedule wsd: a warm-up of {span.warmup:.0%} and a cooldown of {cooldown:.0%} of "
                "the run leave no room; shorten one of them"
            )

        def value(where: float) -> float:
            progress = max(where - stable, 0.0) / (1.0 - stable)
            return end + (start - end) * _COOLDOWNS[self.shape](progress)

        return value


_COOLDOWNS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


@register_schedule("composite")
@dataclass(frozen=True, kw_only=True)
class Composite(ScheduleConfig):
    """Sequence of schedules; the next one begins at each milestone, like torch's SequentialLR.

    Each part has its own start and end. Durations in a part are measured from its beginning, and
    percentages refer to its length.
    """

    needs_end = False

    parts: list[dict[str, Any]] = setting(of="schedules")
    """Schedules, in order."""
    milestones: list[int | str]
    """Times at which the next schedule begins; one fewer than there are parts."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        yield from milestone_problems(self.milestones)
        if len(self.milestones) != len(self.parts) - 1:
            yield (
                f"milestones: {len(self.milestones)} for {len(self.parts)} parts; give one less "
                "than parts, the beginning of each but the first"
            )

    def curve(self, start: float, end: float, span: Span) -> Schedule:
        total = span.length.total_steps
        begin = round(span.warmup * total)  # the first part begins after the warm-up
        ends = [steps_in(text, span.length) for text in self.milestones]
        lengths = [b - a for a, b in zip([begin, *ends], [*ends, total], strict=True)]
        if min(lengths) <= 0:
            raise UserError(
                f"schedule composite: milestones {self.milestones} are steps {ends} of {total}; "
                "they must rise and lie within the run, after the warm-up"
            )
        parts = [
            build_schedule(part, replace(span.length, max_steps=steps))
            for part, steps in zip(self.parts, lengths, strict=True)
        ]
        return join(parts, [steps / (total - begin) for steps in lengths])


def milestone_problems(milestones: Sequence[int | str]) -> Iterator[str]:
    for milestone in milestones:
        try:
            parse_duration(milestone)
        except ValueError as error:
            yield f"milestones: {milestone!r} is {error}"


def build_schedule(value: float | dict[str, Any], length: RunLength) -> Any:
    """Build the schedule of a config value; raise UserError if it does not fit into the run.

    Args:
        value: A number for a constant schedule, or a section with the name of a schedule.
        length: Length of the run.

    Returns:
        A Classy scheduler: a function of progress in [0, 1), with ``update_interval``.
    """
    if not isinstance(value, dict):
        return schedulers.ConstantParamScheduler(value)
    args = {key: item for key, item in value.items() if key != "name"}
    if value["name"] in SCHEDULES:
        return SCHEDULES[value["name"]](**args).build(length)
    return classy.build_schedule(value["name"], args, num_epochs=length.num_epochs)


def last_value(value: float | dict[str, Any], length: RunLength) -> float:
    """Return the value of a schedule at the end of a run."""
    return float(build_schedule(value, length)(1.0 - _EPSILON))
