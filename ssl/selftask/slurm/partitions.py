"""The partitions of the cluster around the login node, and whether a job fits in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selftask.config.checks.sbatch import minutes, show_minutes
from selftask.errors import UserError, nearest
from selftask.slurm.queue import lines


@dataclass(frozen=True)
class Partition:
    """One of them; ``limit`` in minutes, None without a limit."""

    name: str
    limit: int | None
    gpus: bool


def chosen(slurm: dict[str, Any]) -> list[Partition]:
    """The partitions that ``launch.slurm`` names, else the default one; none without SLURM.

    Raises UserError for a name that the cluster does not know.
    """
    known: dict[str, Partition] = {}
    default: list[Partition] = []
    for line in lines("sinfo", "--noheader", "--format=%P|%l|%G"):
        name, limit, resources = (cell.strip() for cell in line.split("|", 2))
        found = Partition(name.rstrip("*"), minutes(limit), "gpu" in resources)
        if found.name in known:  # a line for each kind of node
            found = Partition(found.name, found.limit, found.gpus or known[found.name].gpus)
        known[found.name] = found
        default = [found] if name.endswith("*") else default
    if not known or "partition" not in slurm:
        return default
    names = str(slurm["partition"]).split(",")
    for name in names:
        if name not in known:
            raise UserError(
                f"launch.slurm.partition={slurm['partition']}: no partition {name!r} on this "
                f"cluster; {nearest(name, known)}"
            )
    return [known[name] for name in names]


def check_time(partitions: list[Partition], limit: int) -> None:
    """Raise UserError if none of them runs jobs of so many minutes: it would wait for ever."""
    if partitions and all(p.limit is not None and p.limit < limit for p in partitions):
        longest = max(p.limit or 0 for p in partitions)
        names = " and ".join(p.name for p in partitions)
        raise UserError(
            f"launch.slurm.time: {show_minutes(limit)}, but {names} allows at most "
            f"{show_minutes(longest)}; a run that needs longer is requeued and goes on"
        )
