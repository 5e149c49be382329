"""Writer of the rows as a table for spreadsheets."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import Any

from selftask.files.replace import replacing
from selftask.hooks.base import Task
from selftask.hooks.writers.base import Writer
from selftask.logs import json_row, read_metrics
from selftask.registry import register_hook


@register_hook("csv")
@dataclass(eq=False, kw_only=True)
class Csv(Writer):
    """Writes ``OUT/metrics.csv``, a table of ``metrics.jsonl`` with one column per name.

    The table is rebuilt from ``metrics.jsonl`` at the first row and for each new column. It
    therefore also has the rows from before a resume or before the hook was enabled.
    """

    def open(self, task: Task) -> None:
        self.path = task.out / "metrics.csv"
        self.columns: list[str] = []

    def write(self, step: int, row: dict[str, float]) -> None:
        cells = {"step": step, **row}
        if not cells.keys() <= set(self.columns):
            self._make()
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(json.loads(json_row(cells)))

    def _make(self) -> None:
        rows: list[dict[str, Any]] = read_metrics(self.path.with_suffix(".jsonl"))
        self.columns = list(dict.fromkeys(name for row in rows for name in row))
        with replacing(self.path) as new, new.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, self.columns)
            table.writeheader()
            table.writerows(rows)
