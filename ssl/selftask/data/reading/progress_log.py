"""Progress messages of scanning, listing and copying data, before or during a run."""

from __future__ import annotations

import sys
import time

from selftask.logs import LOGGER, get_logger
from selftask.logs.stages import Stage
from selftask.logs.verbosity import is_quiet

_EVERY_S = 5.0  # seconds between two messages of one scan

log = get_logger(__name__)


def log_progress(text: str) -> None:
    """Log a line, or print it to stderr (unless quiet) if no run has opened a log."""
    if LOGGER.handlers:
        log.info("data: %s", text)
    elif not is_quiet():
        print(f"data: {text}", file=sys.stderr, flush=True)


class ScanProgress:
    """Progress display that counts the images and folders found by several threads.

    Args:
        where: The folder or file that is scanned.
        line: Live line in the terminal. If it is not drawn, a line is logged every few seconds.
    """

    def __init__(self, where: str, line: Stage) -> None:
        self._where = where
        self._line = line
        self._images = self._folders = 0
        self._started = self._reported = time.monotonic()

    def add(self, images: int, folders: int = 0) -> None:
        """Add to the counts. There is no lock: races may lose counts, but only in messages."""
        self._images += images
        self._folders += folders
        self._line.update(self._images, f"images in {self._where}")
        now = time.monotonic()
        if not self._line.is_drawn and now - self._reported > _EVERY_S:
            self._reported = now
            where = f" in {self._folders:,} folders" if self._folders else ""
            seconds = now - self._started
            log_progress(f"{self._where}: {self._images:,} images{where} so far ({seconds:.0f} s)")
