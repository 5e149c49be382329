"""What ran: the head of a report."""

from __future__ import annotations

from selftask.report.page import escape
from selftask.report.record import RunRecord


def head_html(record: RunRecord) -> str:
    """Return the heading of a run's page, with its state."""
    return (
        f'<h1>{escape(record.name)} <span class="state">{escape(record.state)}</span></h1>'
        f'<p class="muted">{escape(record.recipe)} · step {record.step:,}</p>'
    )
