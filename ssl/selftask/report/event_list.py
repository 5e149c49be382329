"""Table of the events of a run, with checkpoints and evaluations folded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from selftask.errors import plural
from selftask.report.page import Section, render
from selftask.report.record import RunRecord, time_of
from selftask.report.verdict import Kind

FOLDED = ("checkpoint", "evaluation")
MAX_SHOWN = 300  # events per table: half of them the oldest, half the newest
KINDS: dict[str, Kind] = {
    "failure": "bad",
    "warning": "warning",
    "stop": "warning",
    "requeue": "warning",
    "finish": "good",
}


def events_section(record: RunRecord) -> Section:
    """Return the section with the events of a run; empty without events."""
    main = [event for event in record.events if event.get("event") not in FOLDED]
    folded = []
    for kind in FOLDED:
        chosen = [event for event in record.events if event.get("event") == kind]
        if chosen:
            folded.append((f"{len(chosen):,} {plural(kind, len(chosen))}", _rows(chosen)))
    return Section("Events", render("run.events", _rows(main), folded), "events")


def _rows(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [_row(event) for event in _shown(events)]


def _shown(events: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Yield the events; if there are too many, one line replaces those in the middle."""
    if len(events) <= MAX_SHOWN:
        yield from events
        return
    half = MAX_SHOWN // 2
    yield from events[:half]
    yield {"event": "", "text": f"… {len(events) - 2 * half:,} more are in events.jsonl"}
    yield from events[-half:]


def _row(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Return time, step, kind, color and text of an event."""
    kind, step = str(event.get("event", "")), event.get("step")
    shown = f"{step:,}" if isinstance(step, int) else ""
    time = time_of(event)
    when = f"{time:%Y-%m-%d %H:%M:%S}" if time else ""
    return when, shown, kind, KINDS.get(kind, "plain"), str(event.get("text", ""))
