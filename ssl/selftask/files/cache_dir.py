"""The cache folder, for results and downloads that later runs reuse."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from selftask.distributed.heartbeat import activity
from selftask.errors import UserError

WAIT_S = 0.1  # seconds between two attempts to take a lock


def cache_path() -> Path:
    """Return ``$SELFTASK_CACHE``, or ``~/.cache/selftask``, without creating it."""
    return Path(os.environ.get("SELFTASK_CACHE") or "~/.cache/selftask").expanduser()


def cache_folder() -> Path:
    """Create ``cache_path`` if needed and return it. Raises UserError if it is not writable."""
    folder = cache_path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        raise UserError(
            f"the cache folder {folder} cannot be used: {error}; "
            "SELFTASK_CACHE=DIR names another one"
        ) from error
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager that only one process of this machine enters at a time, per ``path``.

    ``path`` is an empty lock file, which is created. The kernel releases the lock when the process
    ends, however it ends. On file systems without locks (some network file systems) it has no
    effect.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        with suppress(OSError):  # a file system without locks
            while not take_lock(file):
                with activity("waiting for another process to prepare the data"):
                    time.sleep(WAIT_S)
        yield


def take_lock(file: IO[str]) -> bool:
    """Try to lock an open file, and return whether this succeeded.

    Raises OSError if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
