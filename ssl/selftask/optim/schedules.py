"""Schedules: pure functions of progress ``where`` in [0, 1), without state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fvcore.common.param_scheduler import ExponentialParamScheduler

from selftask import classy
from selftask.classy import schedulers
from selftask.errors import UserError
from selftask.registry import SCHEDULES, register_schedule

Schedule = Callable[[float], float]


@register_schedule("constant")
def constant(start: float, end: float) -> Schedule:
    """The start value throughout."""
    return schedulers.ConstantParamScheduler(start)


@register_schedule("linear")
def linear(start: float, end: float) -> Schedule:
    """A straight line from start to end."""
    return schedulers.LinearParamScheduler(start, end)


@register_schedule("cosine")
def cosine(start: float, end: float) -> Schedule:
    """Half a cosine from start to end (Loshchilov and Hutter, arXiv:1608.03983, no restarts)."""
    return schedulers.CosineParamScheduler(start, end)


@register_schedule("exponential")
def exponential(start: float, end: float) -> Schedule:
    """Exponential decay from start to end, fvcore's; Classy Vision has none."""
    if not (start > 0 and end > 0):
        text = f"schedule exponential: from {start:g} it cannot end at {end:g}"
        raise UserError(f"{text}; optimizer.end_lr=VALUE above 0 is the last learning rate")
    schedule: Schedule = ExponentialParamScheduler(start, end / start)
    return schedule


def build_schedule(
    kind: str, start: float, end: float, *, warmup: float = 0.0, warmup_start: float = 0.0
) -> Schedule:
    """Build a schedule of a ``kind`` from ``start`` to ``end``, with an optional warm-up.

    Args:
        kind: Name of the schedule.
        start: Value at the end of the warm-up.
        end: Value at the end of the run.
        warmup: Fraction of the run with a linear warm-up from ``warmup_start`` to ``start``; the
            schedule spans the remaining fraction.
        warmup_start: Value at the start of the warm-up.
    """
    main: Schedule = SCHEDULES[kind](start, end)
    if warmup <= 0.0:
        return main
    rise = schedulers.LinearParamScheduler(warmup_start, start)
    if warmup >= 1.0:
        return rise
    return schedulers.CompositeParamScheduler(
        [rise, main], [warmup, 1.0 - warmup], ["rescaled"] * 2
    )


def linear_then_constant(start: float, end: float, duration: float) -> Schedule:
    """Build a schedule that is linear over the fraction ``duration`` of the run, then constant.

    Used for the teacher temperature of DINO and the momentum of data2vec.
    """
    return build_schedule("constant", end, end, warmup=duration, warmup_start=start)


def classy_schedule(config: dict[str, Any]) -> Schedule:
    """Build a schedule registered with Classy Vision, such as ``{name: multistep, ...}``."""
    args = {key: item for key, item in config.items() if key != "name"}
    schedule: Schedule = classy.build("schedule", config["name"], args)
    return schedule
