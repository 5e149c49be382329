"""Pages of ``selftask watch``: overview, one run, comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from selftask.errors import with_noun
from selftask.report.compare.comparison_page import (
    comparison_head,
    comparison_sections,
    read_comparison,
)
from selftask.report.compare.tables import Head
from selftask.report.header import head_html, state_badge
from selftask.report.overview.run_line import RunLine
from selftask.report.overview.table import (
    TEXTS,
    Cell,
    cell,
    columns_of,
    count_states,
    smallest_first,
)
from selftask.report.page import Section, page_html, render, static_text
from selftask.report.record import RunRecord
from selftask.report.run_report import NAME, run_sections

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
    heads = [Head(n, "" if n in TEXTS else best[smallest_first(n)]) for n in columns]
    rows = [
        [Cell(render("compare.mark", name)), *(_datum(name, line, column) for column in columns)]
        for name, line in lines.items()
    ]
    html = render("compare.overview", [Head(""), *heads], rows)
    script, style = static_text("compare.js"), static_text("compare.css")
    section = Section("Runs", html, "runs-table", script=script, style=style)
    states = f"{with_noun(len(lines), 'run')}: {count_states(lines.values())}"
    head = render("compare.title", title, states if lines else "no runs yet")
    return _live_page(title, [section], head)


def run_page(name: str, record: RunRecord) -> str:
    """Return the page of a run: its report without images."""
    sections = run_sections(record, record.folder / NAME)
    return _live_page(name, sections, head_html(record), above=_BACK)


def comparison_page(folders: Mapping[str, Path], sort: str = "") -> str:
    """Return the page that compares runs in their current state.

    Args:
        folders: Run folders by name.
        sort: As for ``write_comparison``.

    Raises:
        UserError: As for ``write_comparison``.
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


def _datum(name: str, line: RunLine, column: str) -> Cell:
    if column == "run":
        return Cell(render("compare.watched", name, run_url(name), line.note), name)
    if column == "state":
        return Cell(state_badge(line.state, line.note), line.state)
    shown = cell(line, column)
    return Cell("" if shown.text == "-" else shown.text, shown.key)
