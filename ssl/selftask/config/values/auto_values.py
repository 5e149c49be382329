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
    """CPU cores this process may use, which in a job or container are fewer than there are."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(usable or 1, _quota()))


def _quota() -> int:
    """Cores that a container's share of CPU time amounts to (version 2 and 1 of control groups)."""
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
    """Loader processes for each of ``processes`` on this machine, and how that came about.

    Ranks that somebody else has started (torchrun) are known from LOCAL_WORLD_SIZE only.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = max(processes, int(started) if started.isdecimal() else 1)
    workers = min(cores() // processes, MAX_WORKERS)
    return workers, f"auto: {cores()} cores, {processes} processes, at most {MAX_WORKERS}"
