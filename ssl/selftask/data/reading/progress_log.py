"""What is told while data is looked for, listed or copied, before there is a run or within one."""

from __future__ import annotations

import sys
import time

from selftask.logs import LOGGER, get_logger

_EVERY_S = 5.0  # between two lines about one scan

log = get_logger(__name__)


def say(text: str) -> None:
    """A line in the log, or on the terminal while no run has opened one."""
    if LOGGER.handlers:
        log.info("data: %s", text)
    else:
        print(f"data: {text}", file=sys.stderr, flush=True)


class ScanProgress:
    """Says from time to time how many paths there are so far; threads may add to it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._images = self._folders = 0
        self._started = self._said = time.monotonic()

    def add(self, images: int, folders: int = 0) -> None:
        """Count more of them. Threads that count at once may lose some: it is a line of text."""
        self._images += images
        self._folders += folders
        now = time.monotonic()
        if now - self._said > _EVERY_S:
            self._said = now
            where = f" in {self._folders:,} folders" if self._folders else ""
            seconds = now - self._started
            say(f"{self._where}: {self._images:,} images{where} so far ({seconds:.0f} s)")
