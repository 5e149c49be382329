"""Available memory and out-of-memory kills, as reported by the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ADVICE = "try fewer data.num_workers or a smaller train.batch_size"
_GROUPS = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")  # lines of id:controllers:path; the path is that of the host
_MACHINE = Path("/proc/vmstat")
_FREE = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Return the memory available without swapping, in bytes, or None if it is unknown."""
    with suppress(OSError):
        for line in _FREE.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


class OutOfMemoryKills:
    """Detector of out-of-memory kills since its construction.

    Kills are counted in the control group of this process and on the machine. A container, a SLURM
    job or a login session is a control group, which usually contains all ranks of a machine and
    their workers. The machine's count includes unrelated processes.
    """

    def __init__(self) -> None:
        self._before = _of_group(), _of_machine()

    def explain(self) -> str:
        """Return why a process was killed, or an empty string if no kill was counted."""
        group, machine = self._before
        if _of_group() > group:
            return "out of memory, the kernel has killed it"
        if _of_machine() > machine:
            return "out of memory, perhaps: the kernel has killed processes on this machine"
        return ""


def _of_group() -> int:
    """Return the number of kills in the control group, or 0 if they are not counted."""
    return next((count for path in _files_of_group() if (count := _count(path)) is not None), 0)


def _of_machine() -> int:
    return _count(_MACHINE) or 0


def _files_of_group() -> Iterator[Path]:
    """Yield the counter files of cgroups v2 and v1; in a container the group may be the root."""
    with suppress(OSError):
        for line in _MINE.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            for folder in (path.strip("/"), ""):
                if not controllers:
                    yield _GROUPS / folder / "memory.events"
                elif "memory" in controllers.split(","):
                    yield _GROUPS / "memory" / folder / "memory.oom_control"


def _count(path: Path) -> int | None:
    with suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
