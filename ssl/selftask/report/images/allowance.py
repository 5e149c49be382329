"""How long a report may take to make its images."""

from __future__ import annotations

import time

_SHARE, _LEAST_S, _MOST_S = 0.05, 3.0, 60.0  # of the run's time
_SHORT_S = 20.0  # a run that is over sooner has its images by `selftask report` only


class TooExpensive(Exception):
    """A section would take longer than is allowed; the message says so."""


class Allowance:
    """Seconds that may still be spent; without a limit if ``seconds`` is None."""

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
