"""Decide whether large or small values of a metric are better."""

from __future__ import annotations

from typing import Literal

from selftask.logs import get_logger

log = get_logger(__name__)

Mode = Literal["auto", "max", "min"]


def direction(key: str, mode: Mode, metric: str) -> Literal["max", "min"]:
    """Return ``mode``, or for ``auto`` the direction that follows from the metric's name.

    Names that contain ``loss`` or ``error`` are minimized, all others maximized.

    Args:
        key: Key of the mode in the config, for the log.
        mode: The mode of the config.
        metric: Name of a column of ``metrics.jsonl``.
    """
    if mode != "auto":
        return mode
    small = any(word in metric.lower() for word in ("loss", "error"))
    chosen: Literal["max", "min"] = "min" if small else "max"
    log.info("%s=auto: %s, %s values of %s are good", key, chosen, _WORDS[chosen], metric)
    return chosen


_WORDS = {"max": "large", "min": "small"}
