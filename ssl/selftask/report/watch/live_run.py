"""A run that is read again when its files change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from selftask.report.record import RunRecord

FRESH_S = 1.0  # shortest time for which a result is reused, in seconds
REST = 10  # a result is reused for at least this many times the time it took to compute
_CHANGING = ("metrics.jsonl", "events.jsonl", "status.json", "config.yaml", "checkpoints", "export")
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


class LiveRun:
    """The record of a run folder, read again when a file has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp: list[Any] = []
        self._record: RunRecord | None = None
        self.record = Cached(self._read)

    def _read(self) -> RunRecord:
        """Return the record; raise UserError if the folder is not, or no longer, a run folder."""
        stamp = [_stamp(self.folder / name) for name in _CHANGING]
        if self._record is None or stamp != self._stamp:
            self._record = RunRecord.read(self.folder)
            self._stamp = stamp
        return self._record


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
