"""Ranks and average precision for retrieval.

M images in the database.
"""

from __future__ import annotations

import numpy as np


def ranks_of_positives(
    scores: np.ndarray, positives: np.ndarray, ignored: np.ndarray
) -> np.ndarray:
    """Return the ranks of the positives, from 0 and ascending, without ignored images.

    At equal scores, irrelevant images come before positives. A network that cannot distinguish
    images thus gets the worst ranks, independent of the order of files.

    Args:
        scores: (M,), similarities; the highest is the best.
        positives: Positions in the database.
        ignored: Positions that do not count, even if they are positives.
    """
    irrelevant = np.ones(len(scores), dtype=bool)
    irrelevant[positives] = False
    irrelevant[ignored] = False
    hits = np.sort(scores[np.setdiff1d(positives, ignored)])[::-1]
    others = np.sort(scores[irrelevant])
    before = len(others) - np.searchsorted(others, hits, side="left")
    return before + np.arange(len(hits))


def average_precision(ranks: np.ndarray) -> float:
    """Return the mean of the precision at each positive.

    Args:
        ranks: Ranks of the n >= 1 positives, (n,), ascending; the first image has rank 0.
    """
    return float(np.mean(np.arange(1, len(ranks) + 1) / (ranks + 1)))


def trapezoidal_average_precision(ranks: np.ndarray) -> float:
    """Return the area under the precision-recall curve by the trapezoidal rule, as for Oxford5k.

    Philbin et al. (CVPR 2007): each positive contributes the mean of the precision before and after
    it. The precision before the first image is 1.

    Args:
        ranks: As for ``average_precision``.
    """
    hits = np.arange(len(ranks))
    before = np.where(ranks > 0, hits / np.maximum(ranks, 1), 1.0)
    return float(np.mean((before + (hits + 1) / (ranks + 1)) / 2))


def precision_at(ranks: np.ndarray, k: int) -> float:
    """Return the share of positives among the best k images.

    Images after the last positive do not count. A query with fewer than k positives can thus have
    precision 1. This is the rule of revisited Oxford and Paris (arXiv:1803.11285).

    Args:
        ranks: As for ``average_precision``.
        k: Number of images.
    """
    depth = min(int(ranks[-1]) + 1, k)
    return float((ranks < depth).sum() / depth)
