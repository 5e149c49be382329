"""Partitions of the SLURM cluster and their time limits."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from selftask.config.checks.sbatch import DEFAULT_MINUTES, minutes, options_of, show_minutes
from selftask.config.schema import LaunchConfig
from selftask.errors import UserError, check_known
from selftask.slurm.queue import lines


@dataclass(frozen=True)
class Partition:
    """A SLURM partition."""

    name: str
    limit: int | None  # minutes; None: no limit
    gpus: bool


def chosen(launch: LaunchConfig) -> list[Partition]:
    """Return the partitions of the job; none without SLURM.

    They are those of ``$SBATCH_PARTITION``, which overrides options in a batch script, else those
    named in ``launch.slurm``, else the default one.

    Raises:
        UserError: If a named partition does not exist, or the time of the job exceeds the limit of
            every partition, so that it would stay in the queue forever.
    """
    slurm = options_of(launch.slurm)
    partitions = _named(slurm)
    _check_time(partitions, minutes(slurm.get("time")) or DEFAULT_MINUTES)
    return partitions


def _named(slurm: dict[str, Any]) -> list[Partition]:
    partitions: dict[str, Partition] = {}
    default: list[Partition] = []
    for line in lines("sinfo", "--all", "--noheader", "--format=%P|%l|%G"):  # hidden ones, too
        name, limit, resources = (cell.strip() for cell in line.split("|", 2))
        partition = Partition(name.rstrip("*"), minutes(limit), "gpu" in resources)
        before = partitions.get(partition.name, partition)  # one line per node type
        partition = replace(partition, gpus=partition.gpus or before.gpus)
        partitions[partition.name] = partition
        default = [partition] if name.endswith("*") else default
    key, asked = "launch.slurm.partition", slurm.get("partition")
    if of_user := os.environ.get("SBATCH_PARTITION"):
        key, asked = "SBATCH_PARTITION", of_user
    if not partitions or asked is None:
        return default
    names = str(asked).split(",")
    for name in names:
        check_known(name, partitions, f"{key}={asked}: no partition {name!r} on this cluster")
    return [partitions[name] for name in names]


def _check_time(partitions: list[Partition], limit: int) -> None:
    if partitions and all(p.limit is not None and p.limit < limit for p in partitions):
        longest = max(p.limit or 0 for p in partitions)
        names = " and ".join(p.name for p in partitions)
        raise UserError(
            f"launch.slurm.time: {show_minutes(limit)}, but {names} allows at most "
            f"{show_minutes(longest)}; a run that needs longer is requeued and resumes"
        )
