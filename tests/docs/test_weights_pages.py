"""docs/finetune.md: the table of layouts is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from selftask.models.weights.layouts import LAYOUTS

PAGE = (Path(__file__).resolve().parents[2] / "docs/finetune.md").read_text(encoding="utf-8")


def test_the_table_of_layouts_is_that_of_the_code() -> None:
    written = re.findall(r"^\| (.*) \| `(.*)` \|$", PAGE, re.M)
    assert [(row.writer, row.prefix) for row in LAYOUTS] == [
        row for row in written if row[1].endswith(".")
    ]
