"""Which process this is among how many, as torchrun, SLURM or selftask has set it.

Free of torch: whoever starts processes asks here, too.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

from selftask.errors import UserError

# By which a run is asked to stop; SIGHUP is a closed terminal.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below the ports that Linux gives away by itself


@dataclass(frozen=True)
class World:
    """The process: ``rank`` of ``size``, ``local_rank`` of ``local_size`` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "python"  # or torchrun, slurm, selftask
    master: tuple[str, int] | None = None  # host and port of rank 0; None: the environment says it
    attempt: str = ""  # the same on all ranks, another one when they are started again


def read_world() -> World:
    """The world as the launcher describes it; alone where there is none.

    Raises UserError naming the variables that are missing or contradict one another.
    """
    if any(name in os.environ for name in _NAMES):
        return _from_variables()
    if _number("SLURM_STEP_NUM_TASKS", 1) > 1:  # not in a batch script or salloc's shell
        return _from_slurm()
    return World(attempt=slurm_attempt() if "SLURM_JOB_ID" in os.environ else "")


def _from_variables() -> World:
    missing = [name for name in _NAMES if name not in os.environ]
    if missing:
        present = [name for name in _NAMES if name in os.environ]
        raise UserError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}: "
            "start with torchrun, or unset them for a single process"
        )
    rank, size, local_rank = (_number(name) for name in _NAMES)
    if not 0 <= rank < size:
        raise UserError(f"the environment sets RANK={rank} and WORLD_SIZE={size}: no such rank")
    steps = _number("SLURM_STEP_NUM_TASKS", 1)
    started = os.environ.get("SELFTASK_LAUNCHER") or (
        "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else None
    )
    if started is None and steps > 1 and (rank, size) != (_number("SLURM_PROCID", 0), steps):
        raise UserError(
            f"the environment sets RANK={rank} and WORLD_SIZE={size}, but srun started this "
            f"process as SLURM_PROCID={os.environ.get('SLURM_PROCID')} of {steps}: "
            "unset RANK, WORLD_SIZE and LOCAL_RANK, or start one task a node with torchrun in it"
        )
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UserError(f"the environment sets WORLD_SIZE={size} but not {name}")
    local_size = _number("LOCAL_WORLD_SIZE", size)
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    attempt = ":".join(os.environ.get(name, "") for name in names)
    return World(rank, size, local_rank, local_size, started or "torchrun", attempt=attempt)


def _from_slurm() -> World:
    """A task of srun or submitit: one rank. Rank 0's host is the first of the step's."""
    rank, size = _number("SLURM_PROCID"), _number("SLURM_STEP_NUM_TASKS")
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or str(size)
    local_sizes = expand_counts(tasks)
    host = os.environ.get("MASTER_ADDR") or first_host(os.environ["SLURM_STEP_NODELIST"])
    # A new port for each attempt and step: the last one's may still be held by a dying process.
    attempt = [_number(f"SLURM_{name}", 0) for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    drawn = (attempt[0] * 31 + attempt[1] * 7 + attempt[2]) % _NUM_PORTS
    port = _number("MASTER_PORT", _FIRST_PORT + drawn)
    return World(
        rank,
        size,
        local_rank=_number("SLURM_LOCALID"),
        local_size=local_sizes[min(_number("SLURM_NODEID", 0), len(local_sizes) - 1)],
        launcher="slurm",
        master=(host, port),
        attempt=slurm_attempt(),
    )


def slurm_attempt() -> str:
    """Identify the attempt of a SLURM job, in its batch script and tasks alike."""
    return f"slurm:{os.environ['SLURM_JOB_ID']}:{_number('SLURM_RESTART_COUNT', 0)}"


def is_ignored(number: int) -> bool:
    """Return whether this process ignores a signal since its start, as under nohup."""
    return signal.getsignal(number) is signal.SIG_IGN


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"the environment sets {name}={text!r}: a number is expected") from None


def first_host(hosts: str) -> str:
    """The first of SLURM's node list: ``gpu07`` of ``gpu[07-09,12],cpu1``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST={hosts!r} names no host")
    head, number, tail = match.groups()
    return head + (number or "") + (tail or "")


def expand_counts(tasks: str) -> list[int]:
    """Tasks of each node: ``[2, 2, 1]`` of SLURM's ``2(x2),1``."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={tasks!r} is not a list of counts")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
