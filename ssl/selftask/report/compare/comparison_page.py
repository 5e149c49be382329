"""Page that compares several runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from selftask.errors import UserError, nearest, shorten, with_noun
from selftask.report.charts import Chart, Curve, charts_html
from selftask.report.compare.groups import Comparison, Group, Member, compare
from selftask.report.compare.paired import Pair, paired
from selftask.report.compare.results import results_table
from selftask.report.compare.tables import (
    Link,
    differences_table,
    group_table,
    report_link,
    run_table,
)
from selftask.report.curves import CHARTS, chance_lines
from selftask.report.overview.table import count_states, smallest_first
from selftask.report.page import Section, render, static_text, write_page
from selftask.report.record import RunRecord

MOST_CURVES = 40  # largest number of runs whose curves are drawn, best runs first
_DRAWN = (
    *("loss", "chance_ratio", "emb_std", "effective_rank", "target_entropy"),
    *("lr", "images_per_s", "data_wait"),
)
# columns that have a chart, besides evaluations


def write_comparison(folders: Sequence[Path], path: Path, sort: str = "") -> Comparison:
    """Write the page that compares several runs.

    Args:
        folders: The run folders.
        path: The file to write.
        sort: Column by which runs are ranked. Default: the first evaluation, or else the loss.

    Returns:
        The comparison, best first.

    Raises:
        UserError: If a folder is not a run folder, or no run has the column.
        OSError: If the file cannot be written.
    """
    comparison = read_comparison(folders, sort)
    title = f"{len(folders)} runs: selftask"
    sections = comparison_sections(comparison, partial(report_link, path.parent))
    write_page(path, title, sections, top=comparison_head(comparison))
    return comparison


def read_comparison(
    folders: Sequence[Path], sort: str = "", names: Sequence[str] = ()
) -> Comparison:
    """Return the runs in groups, best first.

    Args:
        folders: The run folders.
        sort: As for ``write_comparison``.
        names: Names of the runs. Default: from their folders.

    Raises:
        UserError: As for ``write_comparison``.
    """
    records = [RunRecord.read(folder) for folder in folders]
    comparison = compare(records, names or names_of(folders))
    columns = {name for member in comparison.members for name in member.record.columns}
    if sort and sort not in columns:
        raise UserError(f"sort={sort}: no run has this column; {nearest(sort, columns)}")
    if sort and sort not in comparison.metrics:
        comparison.evaluations.insert(0, sort)
    ranking = sort or next(iter(comparison.metrics), "")
    if ranking:
        comparison.rank(ranking)
    return comparison


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return names for runs: their folders relative to the common parent folder."""
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([folder.parent for folder in paths])
    return [folder.relative_to(shared).as_posix() for folder in paths]


def comparison_head(comparison: Comparison) -> str:
    """Return the heading: number of runs, the best one, and caveats."""
    members = comparison.members
    states = count_states(member.line for member in members)
    groups = len(comparison.groups)
    return render(
        "compare.head",
        len(members),
        f"{with_noun(groups, 'configuration')}; {states}",
        best_line(comparison),
        _notes(comparison),
    )


def best_line(comparison: Comparison) -> str:
    """Return a sentence that names the best group; empty if there is nothing to rank by."""
    name, first = comparison.ranked_by, comparison.groups[0]
    best = first.final(name) if name else None
    if best is None:
        return ""
    half = "" if best.half is None else f" ± {best.half:.2g}"
    over = f", mean of {best.count} runs" if best.count > 1 else ""
    if not any(member.is_complete for member in first.members):
        over += ", not finished"
    order = "lowest" if smallest_first(name) else "highest"
    return f"{order} {name}: {best.mean:.4g}{half}, {first.label}{over}"


def _notes(comparison: Comparison) -> list[tuple[str, str]]:
    """Return caveats of the comparison as (run, text); the run is empty for notes on all runs."""
    runs, notes = [], []
    for member in comparison.members:
        line = member.line
        if member.is_complete:
            continue
        reached = "" if line.step is None else f" at step {line.step:,}"
        reached += f" of {line.total_steps:,}" if line.total_steps else ""
        text = f"{line.state}{reached}" + (f": {line.note}" if line.note else "")
        text = line.note if line.note.startswith("RUN ") else text
        runs.append((member.name, shorten(text, 320)))
    if any(not m.is_complete for m in comparison.members):
        notes.append("values with * are not from the end of training; means are over finished runs")
    if any(len(group.members) > 1 for group in comparison.groups):
        notes.append("± is the 95 % interval of the mean over seeds (Student's t)")
    lengths = {m.line.total_steps for m in comparison.members if m.line.total_steps}
    if len(lengths) > 1:
        steps = ", ".join(f"{length:,}" for length in sorted(lengths))
        notes.append(f"the runs are of different length: {steps} steps")
    if not comparison.of_one_loss and "loss" in comparison.metrics:
        subject = "methods" if "method.name" in comparison.keys else "settings of the method"
        notes.append(f"the {subject} differ: losses of different scale, not comparable")
    if any(key.startswith("data.") for key in comparison.keys):
        notes.append("the runs read different data")
    return [*runs, *(("", note) for note in notes)]


def comparison_sections(comparison: Comparison, link: Link) -> list[Section]:
    """Return the sections of the page.

    Args:
        comparison: The runs, ranked.
        link: Function that returns the address of a run's report, empty if there is none.
    """
    live = partial(Section, script=static_text("compare.js"), style=static_text("compare.css"))
    of_seeds = any(len(group.members) > 1 for group in comparison.groups)
    pairs = pairs_of(comparison)
    tests = render("compare.pairs", pairs) if pairs else ""
    return [
        live("Configurations", group_table(comparison) if of_seeds else "", "configurations"),
        live("Runs", run_table(comparison, link), "runs-table"),
        Section("Differences on test images", tests, "pairs"),
        live("Results of selftask eval", results_table(comparison), "results-of-eval"),
        live("Curves", _curves(comparison), "curves-of-runs"),
        Section("Differences of configs", differences_table(comparison), "differences"),
    ]


def pairs_of(comparison: Comparison) -> list[Pair]:
    """Return the differences of the runs on the test images of ``selftask eval``."""
    members = comparison.members
    return paired([member.record for member in members], [member.name for member in members])


def _curves(comparison: Comparison) -> str:
    drawn = [(g, m) for g in comparison.groups for m in g.members][:MOST_CURVES]
    names = [*comparison.evaluations, *_DRAWN]
    charts = [_chart(name, drawn) for name in dict.fromkeys(names)]
    clocks = {member.name: member.record.clock for _, member in drawn}
    num_hidden = len(comparison.members) - len(drawn)
    there = {id(group) for group, _ in drawn}
    groups = [group for group in comparison.groups if id(group) in there]
    switched = groups if len(comparison.groups) > 1 else []
    switches = render("compare.switches", switched, MOST_CURVES, num_hidden)
    return f"{switches}{charts_html(charts, clocks=clocks)}"


def _chart(name: str, drawn: Sequence[tuple[Group, Member]]) -> Chart:
    curves, chances = [], set()
    for group, member in drawn:
        column = member.record.columns.get(name)
        if column is None:
            continue
        label, thin = curve_label(group, member), len(group.members) > 1
        curve = Curve(label, column.steps, column.values, group.number, thin, member.name)
        curves.append(curve)
        chance = member.record.last("chance_loss") if name == "loss" else None
        chances |= set() if chance is None else {float(f"{chance:.4g}")}
    chart = CHARTS.get(name, Chart(name, smooth=False))
    lines = chance_lines(chances.pop()) if len(chances) == 1 else chart.lines
    return replace(chart, curves=curves, lines=lines)


def curve_label(group: Group, member: Member) -> str:
    """Return the name of a run in legends."""
    if len(group.members) == 1:
        return group.label
    return f"{group.label}, seed {member.seed}" if member.seed else f"{group.label}, {member.name}"
