"""Write docs/feature-matrix.md from docs/feature-matrix.tsv.

    python tools/feature_matrix.py

The table has one line for each feature of the frameworks that selftask replaces: id, whether it is
essential, feature, status (works, in part, missing, left out), the file that implements it, its
proof (a test as ``tests/file.py::test_name``, or a command), and a note on what is missing, or why
it is left out. ``tests/repository/test_feature_matrix.py`` checks that files, tests and commands
exist.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "feature-matrix.tsv"
PAGE = ROOT / "docs" / "feature-matrix.md"
STATES = ("works", "in part", "missing", "left out")
SOURCES = {
    "V": "VISSL",
    "F": "fast-reid",
    "B": "basecls",
    "M": "mmengine",
    "D": "detectron2",
    "C": "Classy Vision",
    "S": "submitit",
    "U": "Demands of users",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One feature."""

    id: str
    essential: str  # "yes" or ""
    feature: str
    status: str
    home: str  # file or folder in the repository
    proof: str
    note: str


def read_table() -> list[Row]:
    """Return the rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Row(**line) for line in lines]


def page(rows: list[Row]) -> str:
    """Return the page in Markdown."""
    lines = [
        "# Features of other trainers",
        "",
        "For each feature of other trainers, in their words: whether selftask has it, in which",
        "file, and which test shows it. Essential features are in bold. A test checks that every",
        "file, test and command exists. `python tools/feature_matrix.py` writes this page.",
        "",
        "| | " + " | ".join(STATES) + " |",
        "|---|" + "---|" * len(STATES),
        *(_counts(title, [r for r in rows if r.id[0] == key]) for key, title in SOURCES.items()),
        _counts("essential, of all", [r for r in rows if r.essential]),
    ]
    for key, title in SOURCES.items():
        lines += ["", f"## {title}", "", "| id | feature | status | file and test, or reason |"]
        lines += ["|---|---|---|---|", *(_line(row) for row in rows if row.id[0] == key)]
    return "\n".join(lines) + "\n"


def _counts(title: str, rows: list[Row]) -> str:
    count = Counter(row.status for row in rows)
    return f"| {title} | " + " | ".join(str(count[state]) for state in STATES) + " |"


def _line(row: Row) -> str:
    name = f"**{row.id}**" if row.essential else row.id
    proof = ", ".join(f"`{text}`" for text in (row.home, row.proof) if text)
    cells = [name, row.feature, row.status, "; ".join(text for text in (proof, row.note) if text)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(read_table()), encoding="utf-8")
