"""Breakdown of a run's time: parts of a step, evaluations, time between attempts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from selftask.logs.rows import SECTIONS
from selftask.report.overview.durations import show_seconds
from selftask.report.page import Section, render
from selftask.report.record import RunRecord
from selftask.report.verdict import data_wait

LEAST = 0.001  # share of the time below which a part is left out


def time_section(record: RunRecord) -> Section:
    """Return the section with bars of the run's time, empty if nothing was measured."""
    step = _rows(step_parts(record), lambda seconds: f"{1e3 * seconds:,.1f} ms")
    run = _rows(run_parts(record), show_seconds)
    bars = [
        ("A step", "milliseconds of a step, mean over the run", step),
        ("The run", "all attempts together", run),
    ]
    return Section("Where the time went", render("run.time", bars), "time")


def step_parts(record: RunRecord) -> dict[str, float]:
    """Return the mean seconds of the parts of a step.

    The hook ``timing`` measures these parts. Without the hook, there are two parts: waiting for
    data, and everything else; or none before they are known.
    """
    clock, parts = record.clock, {}
    weights = {step: step - before for before, step in pairwise(clock.steps)}
    for section in SECTIONS:  # `ms_probe`, of another hook, is part of `hooks`
        if column := record.columns.get(f"ms_{section}"):
            pairs = [(weights.get(s, 0), v) for s, v in zip(column.steps, column.values)]  # noqa: B905
            total = sum(weight for weight, _ in pairs)
            if total:
                parts[section] = sum(w * v for w, v in pairs) / total / 1e3
    share = data_wait(record.rows)
    if parts or share is None or not clock.steps[-1]:
        return parts
    step = clock.seconds[-1] / clock.steps[-1]
    return {"waiting for data": share * step, "everything else": (1 - share) * step}


def run_parts(record: RunRecord) -> dict[str, float]:
    """Return the seconds of training, of evaluations, and of the rest of the run.

    Empty if no step or no time of start and end is recorded.
    """
    trained, evaluated = record.clock.seconds[-1], record.evaluation_s
    if not trained or not record.started or not record.ended:
        return {}
    total = (record.ended - record.started).total_seconds()
    stopped = max(0.0, total - trained - evaluated)
    return {"training": trained, "evaluations": evaluated, "start, stop, pauses": stopped}


def _rows(parts: dict[str, float], show: Callable[[float], str]) -> list[tuple[str, float, str]]:
    """Return name, share and time of each part."""
    total = sum(parts.values())
    return [(k, s / total, show(s)) for k, s in parts.items() if total and s >= LEAST * total]
