"""Pages of ``selftask watch``: overview, one run, comparison."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from selftask.errors import plural
from selftask.report.compare.comparison_page import (
    comparison_head,
    comparison_sections,
    read_comparison,
)
from selftask.report.compare.tables import Datum, Head, cells_html, heads_html, state_badge
from selftask.report.header import head_html
from selftask.report.overview.run_line import RunLine
from selftask.report.overview.table import cell, columns_of, small_is_good
from selftask.report.page import Section, escape, json_data, page_html, static_text
from selftask.report.record import RunRecord
from selftask.report.run_report import NAME, run_sections
from selftask.report.watch.live_run import live_state

_TEXTS = ("run", "method", "recipe", "state", "job")
_SELF = "'self'"


def run_url(name: str) -> str:
    """Return the address of a run's page."""
    return f"/run/{quote(os.fsencode(name))}/"


def overview_page(title: str, lines: Mapping[str, RunLine]) -> str:
    """Return the page with the table of all runs.

    Args:
        title: Name of the folder.
        lines: The runs by name, in order.
    """
    top = (
        f'<h1>{escape(title)}</h1><p class="muted" id="live-told">{_counts(lines)}</p>'
        f"{json_data({'kind': 'overview', 'tag': table_tag(lines)}, 'live-state')}"
    )
    script, style = static_text("compare.js"), static_text("compare.css")
    columns = _columns(lines)
    html = (
        '<div class="scroll"><table class="sortable" id="runs"><thead><tr>'
        f"{heads_html(_heads(columns))}</tr></thead><tbody>{table_body(lines)}</tbody></table></div>"
        '<p class="controls"><a id="compare" href="/compare">compare all runs</a>'
        '<span class="hint">mark some runs to compare only these</span></p>'
    )
    section = Section("Runs", html, "runs-table", script=script, style=style)
    return page_html(title, [section], top=top, scripts=[_script()], connect=_SELF)


def table_changes(lines: Mapping[str, RunLine]) -> dict[str, Any]:
    """Return the update of the overview."""
    head = heads_html(_heads(_columns(lines)))
    body = table_body(lines)
    return {"tag": table_tag(lines), "head": head, "body": body, "told": _counts(lines)}


def table_tag(lines: Mapping[str, RunLine]) -> str:
    """Return a short text that changes when the table changes."""
    return hashlib.sha256(table_body(lines).encode()).hexdigest()[:16]


def table_body(lines: Mapping[str, RunLine]) -> str:
    """Return the rows of the overview."""
    columns = _columns(lines)
    heads = _heads(columns)
    rows = []
    for name, line in lines.items():
        data = [Datum(_mark(name)), *(_datum(name, line, column) for column in columns)]
        rows.append(f'<tr data-run="{escape(name)}">{cells_html(heads, data)}</tr>')
    return "".join(rows)


def run_page(name: str, record: RunRecord) -> str:
    """Return the page of a run, which updates itself."""
    state = {"kind": "run", **live_state(record)}
    head = head_html(record)
    top = (
        f'<p><a href="/">all runs</a></p><div id="live-head">{head}</div>'
        f'<p class="muted" id="live-told">live</p>{json_data(state, "live-state")}'
    )
    return page_html(
        name,
        run_sections(record, record.folder / NAME),
        top=top,
        scripts=[_script()],
        connect=_SELF,
    )


def comparison_page(folders: Mapping[str, Path], sort: str = "") -> str:
    """Return the page that compares runs in their present state.

    Args:
        folders: Run folders by name.
        sort: As for ``write_comparison``.
    """
    comparison = read_comparison(list(folders.values()), sort, names=list(folders))
    sections = comparison_sections(comparison, lambda member: run_url(member.name))
    top = f'<p><a href="/">all runs</a></p>{comparison_head(comparison)}'
    return page_html(f"{len(folders)} runs", sections, top=top)


def _script() -> str:
    return static_text("live.js")


def _columns(lines: Mapping[str, RunLine]) -> list[str]:
    return columns_of(lines.values())


def _heads(columns: Sequence[str]) -> list[Head]:
    best = {True: "min", False: "max"}
    named = [Head(n, "" if n in _TEXTS else best[small_is_good(n)]) for n in columns]
    return [Head(""), *named]


def _mark(name: str) -> str:
    return f'<input type="checkbox" value="{escape(name)}" aria-label="compare {escape(name)}">'


def _datum(name: str, line: RunLine, column: str) -> Datum:
    found = cell(line, column)
    if column == "run":
        note = _note(line.note) if line.note else ""
        return Datum(f'<a href="{escape(run_url(name))}">{escape(name)}</a>{note}', name)
    if column == "state":
        return Datum(state_badge(line.state, line.note), line.state)
    return Datum("" if found.text == "-" else escape(found.text), found.key)


def _note(text: str) -> str:
    return f'<small class="note bad-text" title="{escape(text)}">{escape(text)}</small>'


def _counts(lines: Mapping[str, RunLine]) -> str:
    counts: dict[str, int] = {}
    for line in lines.values():
        counts[line.state] = counts.get(line.state, 0) + 1
    told = ", ".join(f"{number} {state}" for state, number in counts.items())
    return escape(f"{len(lines)} {plural('run', len(lines))}: {told}" if lines else "no runs yet")
