"""Table of the results of ``selftask eval`` of several runs, from their ``evaluations.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from selftask.errors import shorten
from selftask.files.received import TEXTS, is_number
from selftask.report.compare.groups import Comparison
from selftask.report.compare.tables import SORTABLE, Head
from selftask.report.overview.table import Cell
from selftask.report.page import render

_PLACES = ("data", "import", "out", "prefix", "trust", "train")
_FACTS = {"step", "train_images", "test_images", "classes", "chance", "patches", "size", "views"}
_FACTS |= {"queries", "database", "dimensions"}
_DIGITS = 8  # of a digest that are shown
_MOST_ROWS = 300
_HEADS = (
    Head("metric"),
    Head("run"),
    Head("step", "max", "of the checkpoint"),
    Head("value", "max"),
    Head("95 % interval", title="over test images, or over seeds of the evaluation"),
    Head("settings"),
    Head("seed", title="of the evaluation"),
    Head("images", title="digests of the sets; equal ones are the same images and labels"),
    Head("weights", title="digest of the backbone"),
)


def settings_of(row: dict[str, Any]) -> list[str]:
    """Return the overrides of a result that affect its metrics, sorted.

    Those of the images are left out, which are compared by their digests.
    """
    words = row.get("overrides") if TEXTS.accepts(row.get("overrides")) else None
    return sorted(w for w in words or () if w.partition("=")[0].partition(".")[0] not in _PLACES)


@dataclass(frozen=True)
class Result:
    """Value of one metric in a row of ``evaluations.jsonl`` of a run."""

    metric: str
    run: str
    value: float
    row: dict[str, Any]  # the whole line

    @property
    def interval(self) -> str:
        """Interval over test images, or else over seeds; empty if there is none."""
        for name in (self.metric, f"{self.metric}_seeds"):
            low, high = (self.row.get(f"{name}_{end}") for end in ("low", "high"))
            if is_number(low) and is_number(high):
                return f"{low:.4g} to {high:.4g}"
        return ""

    @property
    def images(self) -> str:
        """Config key and beginning of the digest of each set of images; may be empty."""
        digests = self.row.get("data_digests")
        items = digests.items() if isinstance(digests, dict) else ()
        return ", ".join(f"{key} {str(digest)[:_DIGITS]}" for key, digest in items)

    @property
    def cells(self) -> list[Cell]:
        options = self.row.get("options")
        seed = options.get("seed") if isinstance(options, dict) else None
        shown_seed = "" if seed is None else str(seed)
        weights = str(self.row.get("model_digest") or "")[:_DIGITS]
        facts = (self.interval, " ".join(settings_of(self.row)), shown_seed, self.images, weights)
        step = self.row.get("step")
        shown_step = Cell(f"{step:,}", step) if is_number(step) else Cell("")
        value = Cell(f"{self.value:.4g}", self.value)
        return [_text(self.metric), _text(self.run), shown_step, value, *map(_text, facts)]


def _text(text: str) -> Cell:
    return Cell(shorten(text, 200), shorten(text, 200))


def results_table(comparison: Comparison) -> str:
    """Return the table of metrics that at least two runs have; empty if there are none.

    Of equal evaluations of a run (metric, images, settings), only the newest of its last evaluated
    checkpoint is shown. The table has at most 300 rows.
    """
    newest = {
        (result.metric, result.run, result.images, *settings_of(result.row)): result
        for member in comparison.members
        for result in _results(member.name, member.record.evaluations)
    }
    runs: dict[str, set[str]] = {}
    for result in newest.values():
        runs.setdefault(result.metric, set()).add(result.run)
    shared = [result for result in newest.values() if len(runs[result.metric]) > 1]
    shared.sort(key=lambda result: result.metric)
    rows = [result.cells for result in shared[:_MOST_ROWS]]
    return render(SORTABLE, _HEADS, rows, "results") if rows else ""


def _results(run: str, rows: list[dict[str, Any]]) -> Iterator[Result]:
    """Yield the metrics of the lines of a run, without counts and the bounds of intervals."""
    for row in rows:
        for name, value in row.items():
            if is_number(value) and name not in _FACTS and not name.endswith(("_low", "_high")):
                yield Result(name, run, float(value), row)
