"""Tables of a comparison as HTML; a click on a column head sorts by that column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from selftask.config.values.budget import show_bytes
from selftask.errors import shorten
from selftask.report.compare.differences import SEED
from selftask.report.compare.groups import Comparison, Group, Member
from selftask.report.compare.interval import Interval
from selftask.report.header import state_badge
from selftask.report.overview.durations import show_seconds
from selftask.report.overview.table import Cell, smallest_first
from selftask.report.page import relative_address, render
from selftask.report.verdict import verdict_of

MOST_COLUMNS = 12  # largest number of groups in the table of differences
SORTABLE = "compare.sortable"  # template of a table that the page's script sorts


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


def group_table(comparison: Comparison) -> str:
    """Return the table of groups, with means over seeds and their intervals."""
    heads = [Head("configuration"), Head("runs", "max", "finished runs, of all")]
    rows = []
    for group in comparison.groups:
        complete = sum(member.is_complete for member in group.members)
        row = [
            Cell(render("compare.group", group), group.label),
            Cell(f"{complete} of {len(group.members)}", complete),
        ]
        rows.append(row + _results(group, comparison))
    return render(SORTABLE, [*heads, *_heads_of_results(comparison)], rows, "groups")


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
            name = render(
                "compare.run", group, member.name, link(member), verdict_of(member.record)
            )
            row = [
                Cell(name, member.name),
                Cell(group.label, group.label),
                Cell(state_badge(line.state, line.note), line.state),
                Cell(steps, line.step),
                *_results(Group(group.label, group.number, [member]), comparison),
            ]
            seed = [Cell(member.seed, _sort_key(member.seed))]
            rows.append(row + (seed if seeds else []))
    return render(SORTABLE, heads, rows, "runs")


def _heads_of_results(comparison: Comparison) -> list[Head]:
    heads = []
    for name in comparison.metrics:
        best = "min" if smallest_first(name) else "max"
        heads.append(Head(name, best, "last value; of several seeds their mean, 95 % interval"))
        if name != "loss":
            heads.append(Head(f"best {name}", best, "best value during training"))
    time = Head("time", "min", "of training")
    return [*heads, time, Head("images/s", "max"), Head("memory", "min", "peak")]


def _results(group: Group, comparison: Comparison) -> list[Cell]:
    """Return the cells of metrics and cost: means over the runs of a group."""
    is_complete = any(member.is_complete for member in group.members)
    states = [] if is_complete else list(dict.fromkeys(m.line.state for m in group.members))
    cells = []
    for name in comparison.metrics:
        cells.append(_mean(group.final(name), states))
        if name != "loss":
            cells.append(_mean(group.best(name)))
    costs = {"seconds": show_seconds, "images_per_s": show_rate, "memory": show_bytes}
    return cells + [_mean(group.cost(c), show=show, spread=False) for c, show in costs.items()]


def differences_table(comparison: Comparison) -> str:
    """Return the table of keys in which the configs differ, with a column for each group.

    It has the first 12 groups only. It is empty if there is one group, or if no key but the seed
    differs.
    """
    keys = [key for key in comparison.keys if key != SEED]
    groups = comparison.groups[:MOST_COLUMNS]
    if not keys or len(groups) < 2:
        return ""
    rows = []
    for key in keys:
        values = [group.members[0].settings.get(key) for group in groups]
        rows.append((key, [None if v is None else shorten(v, 300) for v in values]))
    return render("compare.differences", groups, rows, len(comparison.groups) - len(groups))


def report_link(folder: Path, member: Member) -> str:
    """Return the URL of a run's ``report.html`` relative to ``folder``; empty if it is missing."""
    report = member.record.folder / "report.html"
    return relative_address(report, folder) if report.is_file() else ""


def _mean(
    interval: Interval | None,
    states: Sequence[str] = (),
    *,
    show: Callable[[float], str] = "{:.4g}".format,
    spread: bool = True,
) -> Cell:
    if interval is None:
        return Cell("")
    half = f" ± {interval.half:.2g}" if spread and interval.half is not None else ""
    text = f"{show(interval.mean)}{half}"
    return Cell(render("compare.value", text, states), interval.mean)


def show_rate(rate: float) -> str:
    """Format images per second, rates below 10 with two significant digits."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _sort_key(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
