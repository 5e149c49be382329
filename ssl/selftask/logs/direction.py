"""Decide whether large or small values of a metric are better."""

from __future__ import annotations

from typing import Literal

from selftask.logs import get_logger

log = get_logger(__name__)

Mode = Literal["auto", "max", "min"]
_SMALL = (
    *("loss", "error", "perplexity", "distance", "chance_ratio", "unreadable"),
    *("feature_uniformity", "feature_alignment", "median_km", "rmse", "abs_rel"),
)
"""Parts of the names of metrics whose small values are good."""


def direction(key: str, mode: Mode, metric: str) -> Literal["max", "min"]:
    """Return ``mode``, or log and return the direction of the metric's name if it is ``auto``.

    Args:
        key: Key of the mode in the config, for the log line.
        mode: The mode of the config.
        metric: Name of a column of ``metrics.jsonl``.
    """
    if mode != "auto":
        return mode
    chosen: Literal["max", "min"] = "min" if small_is_good(metric) else "max"
    size = "small" if chosen == "min" else "large"
    log.info("%s=auto: %s, %s values of %s are good", key, chosen, size, metric)
    return chosen


def small_is_good(metric: str) -> bool:
    """Return whether small values of a metric are good, by its name.

    The name of a validation set, as in ``photos/knn_top1``, does not count.
    """
    name = metric.rpartition("/")[2].lower()
    return any(part in name for part in _SMALL)
