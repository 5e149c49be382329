"""Memory as the kernel tells of it: how much is free, and whether processes were killed for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ADVICE = "try fewer data.num_workers or a smaller train.batch_size"
_GROUPS = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")  # lines of id:controllers:path, as seen from outside a container
_MACHINE = Path("/proc/vmstat")
_FREE = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """What can be had on this machine without swapping; None where nobody says."""
    with suppress(OSError):
        for line in _FREE.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


class OutOfMemoryKills:
    """Processes killed since this was made, in this one's control group and on the machine.

    Nobody else says so afterwards.

    A container, a job of SLURM or a session is such a group; the ranks of a machine and their
    workers are in one, as a rule. The machine's count holds those of all groups, and strangers'.
    """

    def __init__(self) -> None:
        self._before = _of_group(), _of_machine()

    def explain(self) -> str:
        """What to add to the news that a process of the run was killed; empty: it was not that."""
        group, machine = self._before
        if _of_group() > group:
            return "out of memory, the kernel has killed it"
        if _of_machine() > machine:
            return "out of memory, perhaps: the kernel has killed processes on this machine"
        return ""


def _of_group() -> int:
    """0 where no group counts."""
    return next((count for path in _files_of_group() if (count := _count(path)) is not None), 0)


def _of_machine() -> int:
    return _count(_MACHINE) or 0


def _files_of_group() -> Iterator[Path]:
    """Where cgroups of version 2 and 1 count; in a container this group may stand at the top."""
    with suppress(OSError):
        for line in _MINE.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            for place in (path.strip("/"), ""):
                if not controllers:
                    yield _GROUPS / place / "memory.events"
                elif "memory" in controllers.split(","):
                    yield _GROUPS / "memory" / place / "memory.oom_control"


def _count(path: Path) -> int | None:
    with suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
