"""Check whether local processes are running; raise the open-file limit of this process.

Does not import torch.
"""

from __future__ import annotations

import os
import resource
import socket
from typing import Any

OPEN_FILES = 4096  # enough for the workers of a run


def is_running(pid: int) -> bool:
    """Return True if a process with this id runs on this machine, or if the id is too large."""
    if pid <= 0:  # a group of processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def is_gone(status: dict[str, Any]) -> bool:
    """Return True if a ``status.json`` names a process of this machine that no longer runs."""
    pid = status.get("pid")
    if status.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return not is_running(pid)


def raise_limit_of_open_files() -> None:
    """Raise the soft limit of open files to 4096, or to the hard limit if that is lower.

    It is never lowered. Workers pass batches by file descriptors, and the default is 256 or 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
