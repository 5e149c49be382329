"""Progress messages of scanning, listing and copying data, before or during a run."""

from __future__ import annotations

import sys
import time

from selftask.logs import LOGGER, get_logger

_EVERY_S = 5.0  # between two messages of one scan

log = get_logger(__name__)


def say(text: str) -> None:
    """Log a line; it goes to the terminal if no run has opened a log."""
    if LOGGER.handlers:
        log.info("data: %s", text)
    else:
        print(f"data: {text}", file=sys.stderr, flush=True)


class ScanProgress:
    """Logs from time to time how many paths have been found; used by several threads."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._images = self._folders = 0
        self._started = self._said = time.monotonic()

    def add(self, images: int, folders: int = 0) -> None:
        """Add to the counts, without a lock: races may lose some, in a message only."""
        self._images += images
        self._folders += folders
        now = time.monotonic()
        if now - self._said > _EVERY_S:
            self._said = now
            where = f" in {self._folders:,} folders" if self._folders else ""
            seconds = now - self._started
            say(f"{self._where}: {self._images:,} images{where} so far ({seconds:.0f} s)")
