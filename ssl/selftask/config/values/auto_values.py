"""Values that are ``auto`` in a recipe, computed for the machine that reads it."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

MAX_WORKERS = 8  # per process; more only fight over memory and disk


_MANY = 1 << 20  # cores: no limit
_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the number of CPU cores that this process may use, also in a job or container."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(usable or 1, _quota()))


def _quota() -> int:
    """Return the cores of a container's share of CPU time (control groups, version 2 and 1)."""
    with suppress(OSError, ValueError):
        share, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return _MANY if share == "max" else math.ceil(int(share) / int(period))
    with suppress(OSError, ValueError):
        share, period = (
            (_CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii")
            for name in ("quota", "period")
        )
        return _MANY if int(share) < 0 else math.ceil(int(share) / int(period))
    return _MANY


def num_workers(processes: int) -> tuple[int, str]:
    """Return the number of loader workers for each of ``processes``, and its origin as text.

    Ranks started by other launchers (torchrun) are counted by LOCAL_WORLD_SIZE.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = max(processes, int(started) if started.isdecimal() else 1)
    workers = min(cores() // processes, MAX_WORKERS)
    return workers, f"auto: {cores()} cores, {processes} processes, at most {MAX_WORKERS}"
