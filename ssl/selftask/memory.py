"""Whether the kernel has killed processes for want of memory: nobody else says so afterwards."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_COUNTS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))  # of the group, the machine


def out_of_memory_kills() -> int:
    """How many so far, in this control group, else on this machine; 0 where nobody counts."""
    for path in _COUNTS:
        with suppress(OSError):
            for line in path.read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0
