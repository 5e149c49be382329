"""What is computed once about a data set, and kept for the next run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from selftask.distributed.heartbeat import activity
from selftask.errors import UserError

WAIT_S = 0.1  # between two looks at a lock that another process has


def cache_path() -> Path:
    """``$SELFTASK_CACHE``, or ``~/.cache/selftask``; nothing is made yet."""
    return Path(os.environ.get("SELFTASK_CACHE") or "~/.cache/selftask").expanduser()


def cache_folder() -> Path:
    """``cache_path``, made if it is not there; raises UserError where it cannot be written to."""
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
    """Context in which no other process of this machine is for the same ``path``.

    The lock is the kernel's and ends with the process, however it ends. Where there are no locks
    (some network file systems) everybody is alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        with suppress(OSError):  # as said above
            while not take_lock(file):
                with activity("waiting for another process to prepare the data"):  # it is alive
                    time.sleep(WAIT_S)
        yield


def take_lock(file: IO[str]) -> bool:
    """Whether the lock on an open file is ours now; raises OSError where there are none."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
