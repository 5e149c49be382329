"""A thread that calls functions in order while training goes on."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable

LIMIT = 32  # calls that wait, then the caller does
PATIENCE_S = 10.0  # without a finished call, before a wait is given up


class Background:
    """Calls functions in a thread, one after another, in the order in which they were added.

    Functions must not raise. The thread does not keep the process alive; what is left when it exits
    is waited for.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: deque[Callable[[], None]] = deque()  # the first one is under way
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.wait)

    @property
    def is_full(self) -> bool:
        """True if ``add`` would wait."""
        return len(self._calls) >= LIMIT

    def add(self, call: Callable[[], None]) -> None:
        """Add a function; wait while too many are there already."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_full)
            self._calls.append(call)
            self._changed.notify_all()

    def wait(self) -> int:
        """Wait until every call has returned, or none has for a while; return how many have not."""
        with self._changed:
            left = len(self._calls)
            while left:
                fewer = self._changed.wait_for(lambda: len(self._calls) < left, PATIENCE_S)  # noqa: B023
                if not fewer:
                    break
                left = len(self._calls)
            return left

    def close(self) -> int:
        """Wait as ``wait`` does, and end the thread; return how many calls have not returned."""
        left = self.wait()
        atexit.unregister(self.wait)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return left

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return
                call = self._calls[0]
            call()
            with self._changed:
                self._calls.popleft()
                self._changed.notify_all()
