"""Table of runs: choice of columns, order of rows, output as text or JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selftask.errors import UserError, aligned, nearest, printable_line
from selftask.logs.direction import small_is_good
from selftask.logs.rows import is_measured
from selftask.report.overview.durations import show_seconds
from selftask.report.overview.find import natural
from selftask.report.overview.run_line import RunLine

STATES = (
    *("running", "finished", "interrupted", "requeued", "failed", "hung", "lost", "cancelled"),
    *("pending", "suspended", "not started", "unknown", "unreadable"),
)
TEXTS = ("run", "method", "recipe", "state", "job")  # columns of texts; the others are numbers
MOST_EVALUATIONS = 3  # number of evaluation columns without `columns=`


@dataclass(frozen=True)
class Cell:
    """A cell: its text or HTML, and the value to sort by (None to sort last)."""

    text: str
    key: float | str | None = None


def short_path(folder: Path) -> str:
    """Return the path of a folder, relative to the current folder if it is below that."""
    here = Path.cwd()
    absolute = folder.absolute()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


_FIXED: dict[str, Callable[[RunLine], Cell]] = {
    "run": lambda line: Cell(short_path(line.folder), None),
    "method": lambda line: Cell(line.method or "-", line.method),
    "recipe": lambda line: Cell(line.recipe or "-", line.recipe),
    "job": lambda line: Cell(line.job or "-", line.job),
    "state": lambda line: Cell(line.state, line.state),
    "step": lambda line: Cell(_steps(line), line.step),
    "done": lambda line: Cell(_percent(line.share), line.share),
    "age": lambda line: Cell(_seconds(line.age_s), line.age_s),
    "eta": lambda line: Cell(_seconds(line.eta_s), line.eta_s),
}


def cell(line: RunLine, column: str) -> Cell:
    """Return a cell of the table, ``-`` if the run has no such value."""
    if column in _FIXED:
        return _FIXED[column](line)
    value = line.values.get(column)
    if value is None:
        return Cell("-", None)
    return Cell(f"{value:,.0f}" if column.endswith("per_s") else show_number(value), value)


def show_number(value: float) -> str:
    """Format a number: ``0.8556``, ``17.27``, ``1,409``, ``2.31e+08``.

    Floats below 1000 have four significant digits, larger ones no decimals, and those from 1e7 on
    three significant digits. Integers are shown in full.
    """
    if isinstance(value, float) and abs(value) >= 1000 and math.isfinite(value):
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def columns_of(lines: Iterable[RunLine], chosen: Sequence[str] = ()) -> list[str]:
    """Return the columns of the table: facts about the run, metrics, age and remaining time.

    Args:
        lines: The runs.
        chosen: Columns of metrics; if empty, the loss, up to three evaluations and the throughput.

    Raises:
        UserError: If no run has a chosen column.
    """
    lines = list(lines)
    known = {name for line in lines for name in line.values}
    for name in chosen:
        check_column(name, known)
    evaluations = list(dict.fromkeys(name for line in lines for name in line.evaluations))
    metrics = list(chosen) or ["loss", *evaluations[:MOST_EVALUATIONS], "images_per_s"]
    jobs = ["job"] if any(line.job for line in lines) else []
    first = [*jobs, "run", "method", "state", "step", "done"]
    return list(dict.fromkeys([*first, *metrics, "age", "eta"]))


def check_column(name: str, names: Iterable[str]) -> None:
    """Raise UserError if there is no such column.

    Args:
        name: Name of the column.
        names: Columns of metrics that runs have. Without any, all names are accepted, since runs
            may have just begun.
    """
    every = {*names, *_FIXED}
    if every != set(_FIXED) and name not in every:
        raise UserError(f"no run has a column {name!r}; {nearest(name, every)}")


def with_states(lines: Iterable[RunLine], states: Sequence[str]) -> list[RunLine]:
    """Return the runs in one of the states, or all if none are given.

    Raises:
        UserError: If a state is not one of ``STATES`` or of these runs, whose jobs may have others.
    """
    lines = list(lines)
    known = list(dict.fromkeys([*STATES, *(s for line in lines for s in _plain(line.state))]))
    for state in states:
        if state not in known:
            raise UserError(f"state={state}: {nearest(state, known, show=len(known))}")
    return [line for line in lines if not states or _plain(line.state) & set(states)]


def count_states(lines: Iterable[RunLine]) -> str:
    """Return the number of runs in each state: ``3 running, 1 failed``."""
    counts = Counter(line.state for line in lines)
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def _plain(state: str) -> set[str]:
    """Return the single states in a state such as ``requeued, pending (priority)``."""
    return {part.split(" (")[0].partition(":")[0].strip() for part in state.split(", ")}


def smallest_first(column: str) -> bool:
    """Return whether a table sorted by this column starts with the smallest value."""
    if is_measured(column.rpartition("/")[2]):  # times and memory, also of a validation set
        return not column.endswith("per_s")
    return column in ("age", "eta", *TEXTS) or small_is_good(column)


def sort_by(lines: Iterable[RunLine], column: str) -> list[RunLine]:
    """Sort the runs by a column, best first; ``-column`` reverses the order.

    Runs without the column are last.

    Raises:
        UserError: If no run has the column.
    """
    lines = list(lines)
    name = column.removeprefix("-")
    check_column(name, (name for line in lines for name in line.values))
    if name == "run":
        return sorted(
            lines, key=lambda line: natural(short_path(line.folder)), reverse=column != name
        )
    having = [line for line in lines if cell(line, name).key not in (None, "")]
    rest = [line for line in lines if cell(line, name).key in (None, "")]
    backwards = smallest_first(name) == (column != name)
    return [*sorted(having, key=lambda line: cell(line, name).key, reverse=backwards), *rest]  # type: ignore[arg-type, return-value]


def text_table(lines: Sequence[RunLine], columns: Sequence[str], width: int = 0) -> list[str]:
    """Return the lines of the table; the note of a run is below its line.

    Args:
        lines: The runs.
        columns: Columns from ``columns_of``.
        width: Width of the terminal, to which notes are truncated; 0 does not truncate them.
    """
    heads = [name.upper() if name in _FIXED else printable_line(name) for name in columns]
    body = [[printable_line(cell(line, name).text) for name in columns] for line in lines]
    numbers = [n for n, name in enumerate(columns) if name not in TEXTS]
    head, *rows = aligned([heads, *body], right=numbers)
    text = [head]
    for line, row in zip(lines, rows, strict=True):
        text.append(row)
        if line.note:
            note = f"    {printable_line(line.note)}"
            text.append(f"{note[: width - 3]}..." if 0 < width < len(note) else note)
    return text


def as_json(line: RunLine) -> dict[str, Any]:
    """Return a run as ``selftask runs --json`` prints it: the fields of ``RunLine`` and ``share``.

    Values that are not finite are left out.
    """
    content = asdict(line)
    values = {name: v for name, v in content.pop("values").items() if math.isfinite(v)}
    return {
        "run": short_path(line.folder),
        **{key: item for key, item in content.items() if key != "folder"},
        "share": line.share,
        "values": values,
    }


def _steps(line: RunLine) -> str:
    step = "-" if line.step is None else f"{line.step:,}"
    return step if line.total_steps is None else f"{step}/{line.total_steps:,}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * min(share, 1.0):.0f}%"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else show_seconds(seconds)
