"""Limits of the hook ``health`` and of reports, to detect runs that do not learn.

The module does not import torch, so that reports start fast.
"""

from __future__ import annotations

FROM_STEP = 10  # no warning before, nor near the end, where a schedule may be at 0
UNTIL_WHERE = 0.95
CHANCE_AT_WHERE = 0.25  # progress at which a loss should be below chance
CHANCE_STEPS = 50  # same, in steps
AT_CHANCE = 0.99  # minimum chance_ratio that counts as chance, also relative to the first one
COLLAPSED = 0.05  # emb_std below this is a collapse; healthy MAE on digits has 0.11
MIN_RANK = 1.2  # effective_rank below this is a collapse too


def stays_at_chance(first: float, lowest: float) -> bool:
    """Return True if the smallest loss is at least 99 % of the first loss and of chance.

    Args:
        first: The first ``chance_ratio`` of the run.
        lowest: The smallest one so far.
    """
    return lowest >= AT_CHANCE * max(1.0, first)


def beats_chance(ratio: float) -> bool:
    """Return True if a loss is more than 1 % below that of an uninformed network.

    Args:
        ratio: Value of ``chance_ratio``.
    """
    return ratio < AT_CHANCE
