"""Durations of the parts of start-up, for ``--verbose``."""

from __future__ import annotations

import time

_LAPS: list[tuple[str, float]] = []
_LAST = [time.perf_counter()]


def lap(name: str) -> None:
    """Record the end of a part of start-up; it began at the previous call or this import."""
    now = time.perf_counter()
    _LAPS.append((name, now - _LAST[0]))
    _LAST[0] = now


def take_laps() -> str:
    """Return the parts with their durations, such as ``config 0.31 s, data 1.20 s``; clear them."""
    laps = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in _LAPS)
    _LAPS.clear()
    return laps
