"""Means over test images that keep the score of each image, and intervals of them.

N test images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LEVEL = 0.95
_RESAMPLES = 10_000
_COUNTS = 1 << 22  # maximum number of counts in memory
_FEW = 10  # images that are right or wrong; with fewer, a bootstrap interval is too short


class Figure(float):
    """Float that is a mean over test images or seeds and keeps the averaged values.

    In arithmetic it is a plain float.

    Args:
        value: The mean.
        scores: Score (N,) of each test image, in the order of the data set; None if unknown.
        of_seeds: Result of each seed; empty for one seed.
    """

    scores: np.ndarray | None
    of_seeds: tuple[float, ...]

    def __new__(
        cls, value: float, scores: np.ndarray | None = None, of_seeds: Sequence[float] = ()
    ) -> Figure:
        figure = super().__new__(cls, value)
        figure.scores, figure.of_seeds = scores, tuple(of_seeds)
        return figure

    @classmethod
    def of_scores(cls, scores: Any) -> Figure:
        """Return the mean of the scores (N,) of test images: a tensor or an array."""
        values = np.asarray(scores, dtype=np.float64)
        return cls(values.mean(), values)

    @classmethod
    def of_draws(cls, draws: Sequence[float]) -> Figure:
        """Return the mean of results on the same test images.

        Its ``scores`` are the mean score of each image, or None unless all results have scores.
        """
        scores = [draw.scores for draw in draws if isinstance(draw, Figure)]
        of_images = [part for part in scores if part is not None]
        mean = np.mean(of_images, axis=0) if len(of_images) == len(draws) else None
        return cls(sum(map(float, draws)) / len(draws), mean)

    @classmethod
    def over_seeds(cls, results: Sequence[float]) -> Figure:
        """Return the mean of the results of several seeds, which are kept in ``of_seeds``."""
        mean = cls.of_draws(results)
        return cls(mean, mean.scores, tuple(map(float, results)))


def image_interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean over test images.

    It is the bootstrap interval, or the exact binomial interval (Clopper and Pearson, Biometrika
    1934) if images are right or wrong, and fewer than ten are right or fewer than ten are wrong.

    Args:
        scores: Score (N,) of each image.
    """
    hits = np.count_nonzero(scores)
    misses = len(scores) - hits
    if min(hits, misses) >= _FEW or not np.isin(scores, (0, 1)).all():
        return bootstrap_interval(scores)
    from scipy.special import betaincinv  # slow to import

    tail = (1 - LEVEL) / 2
    low = float(betaincinv(hits, misses + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, misses, 1 - tail)) if misses else 1.0
    return low, high


def bootstrap_interval(
    scores: np.ndarray, *, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean under resampling of images.

    Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13. A resample draws N images
    with replacement. Its mean depends only on how often each distinct score is drawn. These counts
    follow a multinomial distribution, which is sampled directly, so time grows with the number of
    distinct scores and not with N.

    Args:
        scores: (N,), or differences of the scores of two models for a paired bootstrap.
        resamples: Number of resamples.
        seed: Seed of the draws.
    """
    values, counts = np.unique(scores, return_counts=True)
    shares, rng, most = counts / len(scores), np.random.default_rng(seed), _COUNTS // len(values)
    blocks = np.diff([*range(0, resamples, max(1, most)), resamples])  # of resamples
    sums = [rng.multinomial(len(scores), shares, block) @ values for block in blocks]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(sums) / len(scores), (tail, 1 - tail))
    return float(low), float(high)
