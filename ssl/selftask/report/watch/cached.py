"""Results that all readers of the server share for a short time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

FRESH_S = 1.0  # shortest time for which a result is reused, in seconds
REST = 10  # a result is reused for at least this many times the time it took to compute
T = TypeVar("T")


class Cached(Generic[T]):
    """Result of an expensive function, shared by all threads, recomputed when it is too old."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._until = 0.0
        self._value: T | None = None

    def __call__(self) -> T:
        with self._lock:
            begun = time.monotonic()
            if self._value is None or begun >= self._until:
                self._value = self._make()
                ended = time.monotonic()
                self._until = ended + max(FRESH_S, REST * (ended - begun))
            return self._value
