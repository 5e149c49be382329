"""Charts of a page, drawn by uPlot in the browser; long curves are reduced to fewer points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from selftask.report.page import json_data, render
from selftask.report.record import Clock

MAX_POINTS = 2000  # per curve
MAX_POINTS_OF_PAGE = 40_000  # about 16 bytes each
Format = Literal["number", "percent", "bytes", "seconds"]


@dataclass(frozen=True)
class Curve:
    """A curve over steps.

    Args:
        label: Name in the legend.
        steps: Step numbers, increasing.
        values: One value for each step.
        color: Index of the color, which related curves share. Default: by position.
        thin: If True, drawn as a thin line, for example for one of several seeds.
        clock: Key in ``clocks`` of ``charts_html``, for epochs and time of this curve.
    """

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    color: int | None = None
    thin: bool = False
    clock: str = ""


@dataclass(frozen=True)
class Line:
    """A horizontal reference line, such as the loss at chance."""

    label: str
    value: float


@dataclass(frozen=True)
class Chart:
    """Curves in one coordinate system.

    Args:
        title: Heading of the chart.
        curves: The curves.
        lines: Horizontal lines.
        format: Format of values; ``percent`` is for shares from 0 to 1.
        note: One line below the title.
        smooth: If False, the page's smoothing does not apply, for example to a schedule.
        from_zero: If True, the y axis starts at 0.
    """

    title: str
    curves: Sequence[Curve] = ()
    lines: Sequence[Line] = ()
    format: Format = "number"
    note: str = ""
    smooth: bool = True
    from_zero: bool = False


@dataclass(frozen=True)
class Mark:
    """An event, drawn as a vertical line in all charts."""

    step: int
    kind: str
    text: str


def charts_html(
    charts: Sequence[Chart],
    *,
    clocks: dict[str, Clock] | None = None,
    marks: Sequence[Mark] = (),
    id: str = "charts",
    x: str = "step",
) -> str:
    """Return the HTML of charts and their controls: x axis, smoothing, logarithmic y axis.

    Args:
        charts: The charts in order; charts without data are omitted.
        clocks: Clocks by the keys in ``Curve.clock``, of which ``""`` is the default.
        marks: Events to draw as vertical lines.
        id: Id of the element with the data, one for each group of charts on a page.
        x: Name of the x axis, in the singular. ``clocks`` are for ``step`` only.

    Returns:
        HTML, or an empty string if no chart has data.
    """
    charts = [chart for chart in charts if any(len(curve.steps) for curve in chart.curves)]
    if not charts:
        return ""
    number = sum(len(chart.curves) for chart in charts)
    most = min(MAX_POINTS, max(100, MAX_POINTS_OF_PAGE // number))
    data = {
        "x": x,
        "charts": [_chart(chart, most) for chart in charts],
        "clocks": {name: _clock(clock) for name, clock in (clocks or {}).items()},
        "marks": [{"step": m.step, "kind": m.kind, "text": m.text} for m in marks],
    }
    return f"{render('run.charts', id, charts, x)}{json_data(data, id)}"


def thinned(
    steps: Sequence[int], values: Sequence[float], most: int = MAX_POINTS
) -> tuple[list[int], list[float | None]]:
    """Return at most ``most`` points of a curve, including its ends, minima and maxima.

    The curve is divided into about ``most / 2`` equal parts, and the smallest and largest value of
    each part are kept.

    Args:
        steps: Step numbers, increasing.
        values: One value for each step.
        most: Maximum number of points.

    Returns:
        Steps and values, which are rounded to six significant digits. Values that are not finite
        become None; they are kept only as ends, or in parts without a finite value.
    """
    x, y = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    if len(x) > most:
        inner = np.arange(1, len(x) - 1)
        parts = np.array_split(inner, (most - 2) // 2)
        low = np.where(np.isfinite(y), y, np.inf)
        high = np.where(np.isfinite(y), y, -np.inf)
        kept = [0, len(x) - 1]
        for part in parts:
            kept += [part[low[part].argmin()], part[high[part].argmax()]]
        chosen = np.unique(kept)
        x, y = x[chosen], y[chosen]
    return x.tolist(), [_short(value) for value in y.tolist()]


def _chart(chart: Chart, most: int) -> dict[str, Any]:
    curves = []
    for curve in chart.curves:
        steps, values = thinned(curve.steps, curve.values, most)
        style = {"color": curve.color, "thin": curve.thin, "clock": curve.clock}
        curves.append({"label": curve.label, "x": steps, "y": values, **style})
    return {
        "title": chart.title,
        "format": chart.format,
        "smooth": chart.smooth,
        "zero": chart.from_zero,
        "curves": curves,
        "lines": [{"label": line.label, "value": _short(line.value)} for line in chart.lines],
    }


def _clock(clock: Clock) -> dict[str, list[Any]]:
    """Return up to 400 points of a clock; the page interpolates between them."""
    chosen = np.unique(np.linspace(0, len(clock.steps) - 1, 400).round().astype(int))
    return {
        "steps": [clock.steps[i] for i in chosen],
        "epochs": [_short(clock.epochs[i]) for i in chosen],
        "seconds": [_short(clock.seconds[i]) for i in chosen],
    }


def _short(value: float) -> float | None:
    """Round a value to six significant digits; return None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
