"""Tables of a comparison as HTML; a click on a column head sorts by that column."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from selftask.config.values.budget import show_bytes
from selftask.report.compare.differences import SEED
from selftask.report.compare.groups import Comparison, Group, Member
from selftask.report.compare.interval import Interval
from selftask.report.header import state_badge
from selftask.report.overview.durations import show_seconds
from selftask.report.overview.table import small_is_good
from selftask.report.page import escape
from selftask.report.verdict import verdict_of

MOST_COLUMNS = 12  # largest number of groups in the table of differences


@dataclass(frozen=True)
class Head:
    """Head of a column.

    Args:
        text: Text of the head.
        best: Value that a first click puts on top: ``min``, ``max``, or empty for texts.
        title: Explanation, shown on hover.
    """

    text: str
    best: str = ""
    title: str = ""


@dataclass(frozen=True)
class Datum:
    """A cell: its HTML, and the value to sort by, or None to sort last."""

    html: str
    key: float | str | None = None


def sortable(heads: Sequence[Head], rows: Sequence[Sequence[Datum]], id: str) -> str:
    """Return the HTML of a table that the page's script can sort.

    Args:
        heads: Heads of the columns.
        rows: Cells of each row, one for each column.
        id: Id of the element.
    """
    top = "".join(
        f'<th scope="col"{_class(head)} data-best="{head.best}" title="{escape(head.title)}">'
        f'<button type="button">{escape(head.text)}</button></th>'
        for head in heads
    )
    body = "".join(f"<tr>{''.join(map(_cell, heads, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="sortable" id="{escape(id)}">'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _class(head: Head) -> str:
    return ' class="number"' if head.best else ""


def _cell(head: Head, datum: Datum) -> str:
    key = "" if datum.key is None else f' data-key="{escape(datum.key)}"'
    return f"<td{_class(head)}{key}>{datum.html or '-'}</td>"


def group_table(comparison: Comparison) -> str:
    """Return the table of groups, with means over seeds and their intervals."""
    heads = [Head("configuration"), Head("runs", "max", "finished runs, of all")]
    rows = []
    for group in comparison.groups:
        complete = sum(member.is_complete for member in group.members)
        row = [
            Datum(f"{swatch(group)} {escape(group.label)}", group.label),
            Datum(f"{complete} of {len(group.members)}", complete),
        ]
        rows.append(row + _results(group, comparison))
    return sortable([*heads, *_heads_of_results(comparison)], rows, "groups")


Link = Callable[[Member], str]


def run_table(comparison: Comparison, link: Link) -> str:
    """Return the table of single runs, with links to their reports.

    Args:
        comparison: The runs.
        link: Function that returns the address of a run's report, empty if there is none.
    """
    seeds = len({member.seed for member in comparison.members}) > 1
    heads = [Head("run"), Head("configuration"), Head("state"), Head("step", "max")]
    heads += [*_heads_of_results(comparison), *([Head("seed")] if seeds else [])]
    rows = []
    for group in comparison.groups:
        for member in group.members:
            line = member.line
            steps = "" if line.step is None else f"{line.step:,}"
            if line.total_steps and not member.is_complete:
                steps += f" of {line.total_steps:,}"
            name = f"{swatch(group)} {_linked(member, link(member))}{_verdict(member)}"
            row = [
                Datum(name, member.name),
                Datum(escape(group.label), group.label),
                Datum(state_badge(line.state, line.note), line.state),
                Datum(steps, line.step),
                *_results(Group(group.label, group.number, [member]), comparison),
            ]
            seed = [Datum(escape(member.seed), _sort_key(member.seed))]
            rows.append(row + (seed if seeds else []))
    return sortable(heads, rows, "runs")


def _heads_of_results(comparison: Comparison) -> list[Head]:
    heads = []
    for name in comparison.metrics:
        best = "min" if small_is_good(name) else "max"
        heads.append(Head(name, best, "last value; of several seeds their mean, 95 % interval"))
        if name != "loss":
            heads.append(Head(f"best {name}", best, "best value during training"))
    time = Head("time", "min", "of training")
    return [*heads, time, Head("images/s", "max"), Head("memory", "min", "peak")]


def _results(group: Group, comparison: Comparison) -> list[Datum]:
    """Return the cells of metrics and cost: means over the runs of a group."""
    mark = "" if any(member.is_complete for member in group.members) else _unfinished(group.members)
    cells = []
    for name in comparison.metrics:
        cells.append(_mean(group.final(name), mark))
        if name != "loss":
            cells.append(_mean(group.best(name)))
    costs = {"seconds": show_seconds, "images_per_s": show_rate, "memory": show_bytes}
    return cells + [_mean(group.cost(c), show=show, spread=False) for c, show in costs.items()]


def differences_table(comparison: Comparison) -> str:
    """Return the table of keys in which the configs differ, with one column for each group."""
    keys = [key for key in comparison.keys if key != SEED]
    groups = comparison.groups[:MOST_COLUMNS]
    if not keys or len(groups) < 2:
        return ""
    top = "".join(f'<th scope="col">{swatch(g)} {escape(g.label)}</th>' for g in groups)
    rows = []
    for key in keys:
        values = [group.members[0].settings.get(key) for group in groups]
        cells = "".join(
            "<td>-</td>" if v is None else f"<td><code>{escape(_short(v))}</code></td>"
            for v in values
        )
        rows.append(f'<tr><th scope="row"><code>{escape(key)}</code></th>{cells}</tr>')
    more = len(comparison.groups) - len(groups)
    note = (
        f"<p class='muted'>of the best {len(groups)}; {more} more are left out</p>" if more else ""
    )
    return (
        f'{note}<div class="scroll"><table class="differences"><thead><tr><th>key</th>{top}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def swatch(group: Group) -> str:
    """Return a small square in the color of a group's curves."""
    return f'<span class="swatch" style="background: var(--c{group.number % 8})"></span>'


def reports_from(folder: Path) -> Link:
    """Return a function from a run to the address of its report relative to ``folder``, or ""."""

    def link(member: Member) -> str:
        report = member.record.folder / "report.html"
        return (
            quote(os.fsencode(os.path.relpath(report.resolve(), folder.resolve())))
            if report.is_file()
            else ""
        )

    return link


def _linked(member: Member, target: str) -> str:
    name = escape(member.name)
    return f'<a href="{escape(target)}">{name}</a>' if target else name


def _verdict(member: Member) -> str:
    verdict = verdict_of(member.record)
    text = escape(verdict.headline)
    return f'<small class="note {verdict.kind}-text" title="{text}">{text}</small>'


def _mean(
    interval: Interval | None,
    mark: str = "",
    *,
    show: Callable[[float], str] = "{:.4g}".format,
    spread: bool = True,
) -> Datum:
    if interval is None:
        return Datum("")
    half = f" ± {interval.half:.2g}" if spread and interval.half is not None else ""
    return Datum(f"{show(interval.mean)}{half}{mark}", interval.mean)


def _unfinished(members: Sequence[Member]) -> str:
    """Return a mark for values of runs that did not finish."""
    states = ", ".join(dict.fromkeys(member.line.state for member in members))
    return f'<sup title="{escape(states)}: not the end of training">*</sup>'


def show_rate(rate: float) -> str:
    """Format images per second, small rates with two digits."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _sort_key(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."
