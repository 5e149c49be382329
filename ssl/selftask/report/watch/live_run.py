"""A run that is read again when its files change, and the updates for its page."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from selftask.report.charts import Chart
from selftask.report.curves import clock_of, marks_of, run_charts
from selftask.report.header import head_html
from selftask.report.record import RunRecord
from selftask.report.run_report import NAME, run_sections

FRESH_S = 1.0  # shortest time for which a result is reused, in seconds
REST = 10  # a result is reused for at least this many times the time it took to compute
_CHANGING = ("metrics.jsonl", "events.jsonl", "status.json", "config.yaml", "checkpoints", "export")
_STEADY = ("curves", "config")  # sections that are sent only once
T = TypeVar("T")


class Cached(Generic[T]):
    """Result of an expensive function, shared by all threads, recomputed when it is too old."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._until = 0.0
        self._value: T | None = None

    def __call__(self) -> T:
        with self._lock:
            begun = time.monotonic()
            if self._value is None or begun >= self._until:
                self._value = self._make()
                ended = time.monotonic()
                self._until = ended + max(FRESH_S, REST * (ended - begun))
            return self._value


class LiveRun:
    """The record of a run folder, read again when a file has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp: list[Any] = []
        self._record: RunRecord | None = None
        self.record = Cached(self._read)

    def _read(self) -> RunRecord:
        """Return the record; raise UserError if the folder is not, or no longer, a run folder."""
        stamp = [_stamp(self.folder / name) for name in _CHANGING]
        if self._record is None or stamp != self._stamp:
            self._record = RunRecord.read(self.folder)
            self._stamp = stamp
        return self._record


def live_state(record: RunRecord) -> dict[str, Any]:
    """Return the state that a page sends with its requests: its charts and its last step."""
    return {"step": _last_step(record), "shape": _shape(run_charts(record))}


def changes(record: RunRecord, step: int, shape: str) -> dict[str, Any]:
    """Return the update of a page: points of curves from ``step`` on, and the new head.

    Points of ``step`` itself are sent again, since an evaluation adds values to the last step.

    Args:
        record: The run.
        step: Last step that the page has.
        shape: ``shape`` of ``live_state``. If the charts have changed, or a resume has removed
            rows, the page must reload.
    """
    charts = run_charts(record)
    now = _last_step(record)
    if shape != _shape(charts) or now < step:
        return {"reload": True}
    return {
        "step": now,
        "curves": [
            [_points(curve.steps, curve.values, step) for curve in c.curves] for c in charts
        ],
        "clocks": _clock(record),
        "marks": [{"step": m.step, "kind": m.kind, "text": m.text} for m in marks_of(record)],
        "head": head_html(record),
        "sections": {
            section.id: section.html
            for section in run_sections(record, record.folder / NAME)
            if section.id not in _STEADY
        },
    }


def _points(steps: Any, values: Any, since: int) -> dict[str, list[Any]]:
    first = len(steps)
    while first and steps[first - 1] >= since:
        first -= 1
    kept = [value if abs(value) < float("inf") else None for value in values[first:]]
    return {"x": list(steps[first:]), "y": kept}


def _clock(record: RunRecord) -> dict[str, dict[str, list[Any]]]:
    clock = clock_of(record)
    every = max(1, len(clock.steps) // 400)
    chosen = sorted({*range(0, len(clock.steps), every), len(clock.steps) - 1})
    columns = {"steps": clock.steps, "epochs": clock.epochs, "seconds": clock.seconds}
    return {"": {name: [column[i] for i in chosen] for name, column in columns.items()}}


def _shape(charts: list[Chart]) -> str:
    """Return a hash of the titles of charts and the labels of their curves."""
    names = [
        (chart.title, [curve.label for curve in chart.curves]) for chart in charts if chart.curves
    ]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


def _last_step(record: RunRecord) -> int:
    return int(record.rows[-1]["step"]) if record.rows else 0


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
