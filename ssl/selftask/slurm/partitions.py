"""Partitions of the SLURM cluster and their time limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selftask.config.checks.sbatch import minutes, show_minutes
from selftask.errors import UserError, nearest
from selftask.slurm.queue import lines


@dataclass(frozen=True)
class Partition:
    """A SLURM partition."""

    name: str
    limit: int | None  # minutes; None: no limit
    gpus: bool


def chosen(slurm: dict[str, Any]) -> list[Partition]:
    """Return the partitions named in ``launch.slurm``, or the default one.

    Args:
        slurm: Options of sbatch.

    Returns:
        The partitions; an empty list without SLURM.

    Raises:
        UserError: If a named partition does not exist.
    """
    partitions: dict[str, Partition] = {}
    default: list[Partition] = []
    for line in lines("sinfo", "--noheader", "--format=%P|%l|%G"):
        name, limit, resources = (cell.strip() for cell in line.split("|", 2))
        partition = Partition(name.rstrip("*"), minutes(limit), "gpu" in resources)
        if partition.name in partitions:  # one line per node type
            partition = Partition(
                partition.name, partition.limit, partition.gpus or partitions[partition.name].gpus
            )
        partitions[partition.name] = partition
        default = [partition] if name.endswith("*") else default
    if not partitions or "partition" not in slurm:
        return default
    names = str(slurm["partition"]).split(",")
    for name in names:
        if name not in partitions:
            raise UserError(
                f"launch.slurm.partition={slurm['partition']}: no partition {name!r} on this "
                f"cluster; {nearest(name, partitions)}"
            )
    return [partitions[name] for name in names]


def check_time(partitions: list[Partition], limit: int) -> None:
    """Raise UserError if ``limit`` minutes exceed the limit of every partition.

    Otherwise the job would stay in the queue forever.
    """
    if partitions and all(p.limit is not None and p.limit < limit for p in partitions):
        longest = max(p.limit or 0 for p in partitions)
        names = " and ".join(p.name for p in partitions)
        raise UserError(
            f"launch.slurm.time: {show_minutes(limit)}, but {names} allows at most "
            f"{show_minutes(longest)}; a run that needs longer is requeued and goes on"
        )
