"""Time limit for the images of a report."""

from __future__ import annotations

import time

_SHARE, _LEAST_S, _MOST_S = 0.05, 3.0, 60.0  # share of the run's time; its limits in seconds
_SHORT_S = 20.0  # shorter runs get images only from `selftask report`


class TooExpensive(Exception):
    """Raised if a section would exceed the time limit."""


class Allowance:
    """Time limit that starts now; ``seconds`` is None for no limit."""

    def __init__(self, seconds: float | None = None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds

    @property
    def limited(self) -> bool:
        """True if there is a limit."""
        return self._until is not None

    def check(self, estimate: float) -> None:
        """Raise TooExpensive if work of ``estimate`` seconds would exceed the limit."""
        if self._until is None:
            return
        left = self._until - time.monotonic()
        if estimate > left or left <= 0:
            told = f"it would take about {estimate:.0f} s" if estimate >= 1 else "no time was left"
            raise TooExpensive(told)


def limit_at_end(run_seconds: float) -> float:
    """Return the seconds that images may take at the end of a run of ``run_seconds``."""
    if run_seconds < _SHORT_S:
        return 0.0
    return min(max(_LEAST_S, _SHARE * run_seconds), _MOST_S)
