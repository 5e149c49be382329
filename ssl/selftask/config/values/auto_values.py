"""Values that are ``auto`` in a recipe, computed for this machine."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from selftask.distributed.world import World
from selftask.errors import with_noun

_MANY = 1 << 20  # number of cores that means no limit
_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the number of CPU cores, at least 1, that this process may use.

    It is limited by the process's affinity, as in a job, and by the quota of a container.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(usable or 1, _quota()))


def cores_of_ranks(world: World) -> int:
    """Return the number of CPU cores that the ranks on this machine may use together.

    srun may bind each rank to cores of its own, so that ``cores`` counts those of a single rank.
    """
    allocated = os.environ.get("SLURM_CPUS_ON_NODE", "") if world.launcher == "slurm" else ""
    return int(allocated) if allocated.isdecimal() else cores()


def _quota() -> int:
    """Return the CPU quota of a container (cgroup v2 or v1) in cores; ``_MANY`` without one."""
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
    """Return the number of loader workers per process, which may be 0, and a text that explains it.

    Args:
        processes: Processes on this machine. The number in LOCAL_WORLD_SIZE, which launchers such
            as torchrun set, is used if it is larger.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = max(processes, int(started) if started.isdecimal() else 1)
    number = cores()
    origin = f"auto: {with_noun(number, 'core')}, {with_noun(processes, 'rank')}"
    return number // processes, origin
