"""A thread that calls functions in order in the background."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable

LIMIT = 32  # maximum number of pending calls, at which ``add`` waits
PATIENCE_S = 10.0  # ``wait`` gives up if no call finishes in this time


class Background:
    """Calls functions in a thread, one after another, in the order in which they were added.

    Functions must not raise. The thread is a daemon; at exit the process waits for pending calls as
    ``wait`` does.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: deque[Callable[[], None]] = deque()  # the first one is running
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
        """Add a function; wait while too many are pending."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_full)
            self._calls.append(call)
            self._changed.notify_all()

    def wait(self) -> int:
        """Wait for pending calls until none ends within ``PATIENCE_S``; return how many remain."""
        with self._changed:
            remaining = len(self._calls)
            while remaining:
                fewer = self._changed.wait_for(lambda: len(self._calls) < remaining, PATIENCE_S)  # noqa: B023
                if not fewer:
                    break
                remaining = len(self._calls)
            return remaining

    def close(self) -> int:
        """Wait as ``wait`` does, and return how many calls remain; the thread ends after them."""
        remaining = self.wait()
        atexit.unregister(self.wait)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return remaining

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
