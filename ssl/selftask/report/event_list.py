"""Table of the events of a run, with checkpoints and evaluations folded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from selftask.errors import plural
from selftask.report.page import Section, escape
from selftask.report.record import RunRecord
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
    parts = [_table(main)] if main else []
    for kind in FOLDED:
        chosen = [event for event in record.events if event.get("event") == kind]
        if chosen:
            number = f"{len(chosen):,} {plural(kind, len(chosen))}"
            parts.append(f"<details><summary>{number}</summary>{_table(chosen)}</details>")
    return Section("Events", "".join(parts), "events")


def _table(events: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(_row(event) for event in _shown(events))
    head = "<thead><tr><th>time</th><th class=number>step</th><th>event</th><th></th></tr></thead>"
    return f'<div class="scroll"><table class="events">{head}<tbody>{rows}</tbody></table></div>'


def _shown(events: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Yield the events; if there are too many, one line replaces those in the middle."""
    if len(events) <= MAX_SHOWN:
        yield from events
        return
    half = MAX_SHOWN // 2
    yield from events[:half]
    yield {"event": "", "text": f"… {len(events) - 2 * half:,} more are in events.jsonl"}
    yield from events[-half:]


def _row(event: Mapping[str, Any]) -> str:
    kind = str(event.get("event", ""))
    badge = f'<span class="badge {KINDS.get(kind, "plain")}">{escape(kind)}</span>' if kind else ""
    step = event.get("step")
    shown = f"{step:,}" if isinstance(step, int) else ""
    return (
        f"<tr><td class=mono>{escape(_time(event))}</td><td class=number>{shown}</td>"
        f"<td>{badge}</td><td>{escape(event.get('text', ''))}</td></tr>"
    )


def _time(event: Mapping[str, Any]) -> str:
    try:
        return f"{datetime.fromisoformat(str(event['time'])):%Y-%m-%d %H:%M:%S}"
    except (KeyError, ValueError):
        return ""
