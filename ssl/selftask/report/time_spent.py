"""Breakdown of a run's time: parts of a step, evaluations, time between attempts."""

from __future__ import annotations

from selftask.report.overview.durations import show_seconds
from selftask.report.page import Section, escape
from selftask.report.record import RunRecord
from selftask.report.verdict import data_wait

PARTS = "ms_"  # prefix of the columns of the hook `timing`
LEAST = 0.001  # share of the time below which a part is left out


def time_section(record: RunRecord) -> Section:
    """Return the section with bars of the run's time, empty if nothing was measured."""
    parts = step_parts(record)
    bars = [_bars("A step", "milliseconds of a step, mean over the run", parts, milliseconds=True)]
    bars.append(_bars("The run", "all attempts together", run_parts(record), milliseconds=False))
    return Section("Where the time went", "".join(bars), "time")


def step_parts(record: RunRecord) -> dict[str, float]:
    """Return the mean seconds of the parts of a step.

    These are the parts that the hook ``timing`` measures. Without the hook, they are waiting for
    data and everything else.
    """
    parts: dict[str, float] = {}
    weights = _weights(record)
    for name, column in record.columns.items():
        if name.startswith(PARTS):
            pairs = [(weights.get(step, 0), v) for step, v in zip(column.steps, column.values)]  # noqa: B905
            total = sum(weight for weight, _ in pairs)
            if total:
                parts[name.removeprefix(PARTS)] = sum(w * v for w, v in pairs) / total / 1e3
    if parts:
        return parts
    share, seconds = data_wait(record.rows), _seconds(record)
    steps = sum(weights.values())
    if share is None or not steps:
        return {}
    step = seconds / steps
    return {"waiting for data": share * step, "everything else": (1 - share) * step}


def run_parts(record: RunRecord) -> dict[str, float]:
    """Return the seconds of training, of evaluations, and of the rest of the run.

    Empty if no step or no time of start and end is recorded.
    """
    trained = _seconds(record)
    evaluated = sum(record.columns["eval_s"].values) if "eval_s" in record.columns else 0.0
    if not trained or not record.started or not record.ended:
        return {}
    total = (record.ended - record.started).total_seconds()
    stopped = max(0.0, total - trained - evaluated)
    return {"training": trained, "evaluations": evaluated, "start, stop, pauses": stopped}


def _weights(record: RunRecord) -> dict[int, int]:
    """Return the number of steps since the previous row, by the step of each row."""
    steps = record.columns["step_s"].steps if "step_s" in record.columns else []
    return {step: step - before for before, step in zip([0, *steps], steps, strict=False)}


def _seconds(record: RunRecord) -> float:
    column = record.columns.get("step_s")
    weights = _weights(record)
    if column is None:
        return 0.0
    return sum(weights[s] * v for s, v in zip(column.steps, column.values, strict=True))


def _bars(title: str, note: str, parts: dict[str, float], *, milliseconds: bool) -> str:
    total = sum(parts.values())
    if not total:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class=number>{value / total:.1%}</td>'
        f"<td class=number>{_time(value, milliseconds)}</td>"
        f'<td class="bar"><div style="width:{100 * value / total:.2f}%"></div></td></tr>'
        for name, value in parts.items()
        if value >= LEAST * total
    )
    table = f'<table class="bars"><tbody>{rows}</tbody></table>'
    return f"<h3>{escape(title)}</h3><small>{escape(note)}</small>{table}"


def _time(seconds: float, milliseconds: bool) -> str:
    return f"{1e3 * seconds:,.1f} ms" if milliseconds else show_seconds(seconds)
