"""Mean of a few values with its 95 % confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """Mean of ``count`` values; ``half`` is half the width of the interval, None for one value."""

    mean: float
    half: float | None
    count: int


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean and 95 % interval (Student's t) of finite values, or None if there are none.

    The n values, such as those of runs with different seeds, are assumed to be independent samples
    of a normal distribution. With their standard deviation s and the 97.5 % quantile t of Student's
    distribution with n - 1 degrees of freedom, the interval is mean +- t * s / sqrt(n).
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, None, 1)
    from scipy.special import stdtrit  # slow to import

    quantile = float(stdtrit(count - 1, (1 + LEVEL) / 2))
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(count), count)
