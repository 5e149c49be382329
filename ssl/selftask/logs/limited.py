"""Rate limits for log lines, by line of code.

For example ``if every_n_seconds(30): log.warning(...)``. Each process counts its own calls, so the
results may differ between ranks and must not guard collectives.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

_calls: Counter[tuple[str, int]] = Counter()  # by file and line
_times: dict[tuple[str, int], float] = {}  # of the last call that was True


def first_n(count: int = 1) -> bool:
    """Return True in the first ``count`` calls from a line of code."""
    return _call() <= count


def every_n(count: int) -> bool:
    """Return True in the first call from a line of code, and in each ``count``-th one after it."""
    return (_call() - 1) % count == 0


def every_n_seconds(seconds: float) -> bool:
    """Return True unless a call from this line returned True less than ``seconds`` ago."""
    line, now = _caller(), time.monotonic()
    if now - _times.get(line, float("-inf")) < seconds:
        return False
    _times[line] = now
    return True


def _call() -> int:
    """Count a call, and return the number of calls from the same line so far."""
    line = _caller()
    _calls[line] += 1
    return _calls[line]


def _caller() -> tuple[str, int]:
    """Return file and line from which a function of this module was called."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
