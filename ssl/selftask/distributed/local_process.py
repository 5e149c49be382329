"""Whether a process of this machine, named in a file, still runs. Does not import torch."""

from __future__ import annotations

import os
import socket
from typing import Any


def is_running(pid: int) -> bool:
    """Return whether a process with this id runs on this machine."""
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
