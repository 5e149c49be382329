"""What several rounds of one measurement say together, when contestants take turns in each."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def in_turns(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of round ``number``: nobody always comes after the same one."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def median_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median of one value a round, and its 95 % interval by 2000 bootstraps."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]
