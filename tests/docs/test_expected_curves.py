"""docs/expected-curves.md: losses at chance are those of the methods."""

from __future__ import annotations

import math
import re

import pytest

from page_blocks import ROOT
from selftask.methods.base import Method
from selftask.registry import METHODS

PAGE = (ROOT / "docs/expected-curves.md").read_text(encoding="utf-8")
ROWS = {
    name: cells
    for name, *cells in re.findall(
        r"^\| `(\w+)` \| (.*) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE
    )
}


def test_losses_at_chance_by_hand() -> None:
    """Other rows are as up to date as these, see tests/methods/test_method_tables.py."""
    by_hand = {
        "barlow": (512, 1024, 0.024 * 8192),
        "moco": (math.log(1 + 1024), math.log(1 + 4096), math.log(1 + 65_536)),
        "simclr": (math.log(1 + 2 * 255), math.log(1 + 2 * 63), 2 * math.log(1 + 2 * 4095)),
        "rotation": (math.log(4), math.log(4), math.log(4)),
        "relative_location": (math.log(8), math.log(8), math.log(8)),
        "supervised": (math.log(10), math.log(10), math.log(1000)),
    }
    for method, expected in by_hand.items():
        assert [float(cell) for cell in ROWS[method][1:]] == pytest.approx(expected, abs=0.006)


def test_every_method_with_a_chance_level_is_listed() -> None:
    with_chance = {n for n in METHODS.names() if METHODS[n].chance_loss is not Method.chance_loss}
    assert with_chance == set(ROWS)


def test_numbers_that_people_paste() -> None:
    for value, number in re.findall(r"([\d.]{4,}) is ln ([\d,]+)", PAGE):
        digits = len(value.partition(".")[2])
        assert math.log(int(number.replace(",", ""))) == pytest.approx(
            float(value), abs=0.51 * 10**-digits
        )
    assert math.log(65_537) == pytest.approx(11.09, abs=0.005)
