"""Values that are ``auto`` in a recipe, computed for the machine that reads it."""

from __future__ import annotations

import os

MOST_WORKERS = 8  # per process; more only fight over memory and disk


def cores() -> int:
    """CPU cores this process may use, which in a job or container are fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_workers(processes: int) -> tuple[int, str]:
    """Loader processes for each of ``processes`` on this machine, and how that came about."""
    workers = min(cores() // processes, MOST_WORKERS)
    return workers, f"auto: {cores()} cores, {processes} processes, at most {MOST_WORKERS}"
