"""Statistics over rounds of a measurement, in which entries take turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import TypeVar

Entry = TypeVar("Entry")


def in_turns(entries: Sequence[Entry], number: int) -> list[Entry]:
    """Return the entries in the order of round ``number``, so that the order changes."""
    turn = number % len(entries)
    return [*entries[turn:], *entries[:turn]]


def median_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of one value per round, and its 95 % interval by 2000 bootstraps."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]
