"""Paired bootstrap of two runs on the same test images, from their ``evaluations.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from selftask.evaluate.figure import bootstrap_interval
from selftask.evaluate.image_scores import unpacked_scores
from selftask.files.received import TEXTS
from selftask.report.compare.results import settings_of
from selftask.report.record import RunRecord

SCORES = "image_scores"  # key of a row
_MOST_RUNS = 6  # largest number of runs of which all pairs are compared


@dataclass(frozen=True)
class Pair:
    """Difference of two runs in one metric."""

    metric: str
    images: int
    names: tuple[str, str]
    means: tuple[float, float]
    low: float  # of the 95 % interval of the first mean minus the second
    high: float

    @property
    def differs(self) -> bool:
        """True if the interval does not contain 0."""
        return self.low > 0 or self.high < 0

    @property
    def text(self) -> str:
        """The means, their difference with its interval, and the conclusion, in one line."""
        first, second = (
            f"{name} {mean:.4g}" for name, mean in zip(self.names, self.means, strict=True)
        )
        verdict = "they differ" if self.differs else "no difference shown"
        return (
            f"{self.metric} on the same {self.images:,} test images: {first}, {second}; difference "
            f"{self.means[0] - self.means[1]:.4g}, 95 % interval {self.low:.4g} to {self.high:.4g}"
            f": {verdict}"
        )


def paired(records: Sequence[RunRecord], names: Sequence[str]) -> list[Pair]:
    """Return the differences between pairs of runs in metrics on the same test images.

    The newest result of a run's last evaluated checkpoint is used. Results are compared if their
    training images, test images and evaluation settings are the same, and equally many test images
    were readable. If there are more than six runs, only pairs with the first run are compared.

    Args:
        records: The runs, best first.
        names: Name of each run.
    """
    results = [dict(_results(record)) for record in records]
    pairs = combinations(range(len(records)), 2)
    if len(records) > _MOST_RUNS:
        pairs = ((0, number) for number in range(1, len(records)))  # type: ignore[assignment]
    made = []
    for one, other in pairs:
        for key in results[one].keys() & results[other].keys():
            scores = results[one][key], results[other][key]
            if len(scores[0]) != len(scores[1]):  # an image could not be read in one of them
                continue
            low, high = bootstrap_interval(scores[0] - scores[1])
            means = float(scores[0].mean()), float(scores[1].mean())
            pair = (names[one], names[other])
            made.append((key, Pair(key[0], len(scores[0]), pair, means, low, high)))
    return [pair for _, pair in sorted(made, key=lambda item: item[0])]


def _results(record: RunRecord) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Yield (metric, digests, settings) and scores of each result of a run, those to use last."""
    for row in record.evaluations:
        packed = row.get(SCORES)
        if not isinstance(packed, dict) or not TEXTS.accepts(row.get("overrides")):
            continue
        for metric, stored in packed.items():
            scores = unpacked_scores(stored)
            if scores is not None:
                digests = (_text(stored.get("train")), _text(stored.get("test")))
                yield (str(metric), *digests, *settings_of(row)), scores


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
