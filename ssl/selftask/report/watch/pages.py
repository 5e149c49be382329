"""Pages of ``selftask watch``: overview, one run, comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from selftask.errors import plural
from selftask.report.compare.comparison_page import (
    comparison_head,
    comparison_sections,
    read_comparison,
)
from selftask.report.compare.tables import Datum, Head, sortable
from selftask.report.header import head_html, state_badge
from selftask.report.overview.run_line import RunLine
from selftask.report.overview.table import cell, columns_of, count_states, small_is_good
from selftask.report.page import Section, escape, page_html, static_text
from selftask.report.record import RunRecord
from selftask.report.run_report import NAME, run_sections

_TEXTS = ("run", "method", "recipe", "state", "job")
_BACK = '<p><a href="/">all runs</a></p>'


def run_url(name: str) -> str:
    """Return the address of a run's page."""
    return f"/run/{quote(os.fsencode(name))}/"


def overview_page(title: str, lines: Mapping[str, RunLine]) -> str:
    """Return the page with the table of all runs.

    Args:
        title: Name of the folder.
        lines: The runs by name, in order.
    """
    columns = columns_of(lines.values())
    best = {True: "min", False: "max"}
    heads = [Head(n, "" if n in _TEXTS else best[small_is_good(n)]) for n in columns]
    rows = [
        [Datum(_mark(name)), *(_datum(name, line, column) for column in columns)]
        for name, line in lines.items()
    ]
    html = (
        f"{sortable([Head(''), *heads], rows, 'runs')}"
        '<p class="controls"><a id="compare" href="/compare">compare all runs</a>'
        '<span class="hint">mark some runs to compare only these</span></p>'
    )
    script, style = static_text("compare.js"), static_text("compare.css")
    section = Section("Runs", html, "runs-table", script=script, style=style)
    states = f"{len(lines)} {plural('run', len(lines))}: {count_states(lines.values())}"
    about = escape(states if lines else "no runs yet")
    head = f'<h1>{escape(title)}</h1><p class="muted">{about}</p>'
    return _live_page(title, [section], head)


def run_page(name: str, record: RunRecord) -> str:
    """Return the page of a run: its report without images."""
    sections = run_sections(record, record.folder / NAME)
    return _live_page(name, sections, head_html(record), above=_BACK)


def comparison_page(folders: Mapping[str, Path], sort: str = "") -> str:
    """Return the page that compares runs in their present state.

    Args:
        folders: Run folders by name.
        sort: As for ``write_comparison``.
    """
    comparison = read_comparison(list(folders.values()), sort, names=list(folders))
    sections = comparison_sections(comparison, lambda member: run_url(member.name))
    top = f"{_BACK}{comparison_head(comparison)}"
    return page_html(f"{len(folders)} runs", sections, top=top)


def _live_page(title: str, sections: Sequence[Section], head: str, above: str = "") -> str:
    """Return a page that reloads itself and shows what has changed."""
    status = '<p class="muted" id="live-status">live</p>'
    top = f'{above}<div id="live-head">{head}</div>{status}'
    return page_html(title, sections, top=top, scripts=[static_text("live.js")], connect="'self'")


def _mark(name: str) -> str:
    return f'<input type="checkbox" value="{escape(name)}" aria-label="compare {escape(name)}">'


def _datum(name: str, line: RunLine, column: str) -> Datum:
    if column == "run":
        note = _note(line.note) if line.note else ""
        return Datum(f'<a href="{escape(run_url(name))}">{escape(name)}</a>{note}', name)
    if column == "state":
        return Datum(state_badge(line.state, line.note), line.state)
    shown = cell(line, column)
    return Datum("" if shown.text == "-" else escape(shown.text), shown.key)


def _note(text: str) -> str:
    return f'<small class="note bad-text" title="{escape(text)}">{escape(text)}</small>'
