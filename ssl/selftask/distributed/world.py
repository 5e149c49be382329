"""Rank and world size of this process, as set by torchrun, SLURM, MPI or selftask.

Does not import torch, since launchers also use it.
"""

from __future__ import annotations

import os
import re
import signal
import zlib
from dataclasses import dataclass

from selftask.errors import UserError

# Signals that request a stop. A closed terminal sends SIGHUP.
STOP_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),  # before the time limit: `sbatch --signal`, submitit
)
INIT_FILE = "SELFTASK_INIT_FILE"  # a new file that all ranks see, in place of MASTER_ADDR
LISTEN_FD = "SELFTASK_LISTEN_FD"  # rank 0's file descriptor of a socket that listens at MASTER_PORT
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MPI_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below Linux's ephemeral ports


@dataclass(frozen=True)
class World:
    """Rank of this process among ``size``, and local rank among ``local_size`` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "python"  # python | torchrun | slurm | selftask | mpi | submitit
    master: tuple[str, int] | None = None  # host and port of rank 0; None: MASTER_ADDR, MASTER_PORT
    attempt: str = ""  # equal on all ranks; differs after a restart


def read_world() -> World:
    """Return the world as described by the launcher; a single process if there is none.

    Raises:
        UserError: If environment variables are missing or contradict each other.
    """
    if any(name in os.environ for name in _NAMES):
        return _from_variables()
    if "SUBMITIT_LOCAL_JOB_ID" in os.environ:  # may have been started from a SLURM job's shell
        return _from_local_job()
    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # before SLURM: srun may have started mpirun's daemons
        return _from_mpi(*(f"OMPI_COMM_WORLD_{name}" for name in _MPI_NAMES))
    if "MPI_LOCALNRANKS" in os.environ:  # MPICH, Intel MPI
        return _from_mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if _number("SLURM_STEP_NUM_TASKS", 1) > 1:  # not in a batch script or salloc's shell
        return _from_slurm()
    if _number("NODE_RANK", 0):
        raise UserError(
            f"the environment sets NODE_RANK={os.environ['NODE_RANK']} but not RANK, WORLD_SIZE "
            "and LOCAL_RANK: this process would train alone; start torchrun --node_rank=$NODE_RANK "
            "on each machine, or unset NODE_RANK"
        )
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
    if size > 1 and INIT_FILE not in os.environ:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UserError(f"the environment sets WORLD_SIZE={size} but not {name}")
    local_size = _number("LOCAL_WORLD_SIZE", size)
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    attempt = ":".join(os.environ.get(name, "") for name in (INIT_FILE, *names))
    return World(rank, size, local_rank, local_size, started or "torchrun", attempt=attempt)


def _from_slurm() -> World:
    """Return the world of a task of srun or submitit; rank 0 is on the first host of the step."""
    rank, size = _number("SLURM_PROCID"), _number("SLURM_STEP_NUM_TASKS")
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or str(size)
    local_sizes = expand_counts(tasks)
    host = os.environ.get("MASTER_ADDR") or first_host(os.environ["SLURM_STEP_NODELIST"])
    # Each attempt uses a new port: a dying process may still hold the previous one.
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


def _from_local_job() -> World:
    """Return the world of a task of submitit's local executor."""
    rank, size = (_number(f"SUBMITIT_LOCAL_{name}") for name in ("GLOBALID", "NTASKS"))
    job = _number("SUBMITIT_LOCAL_JOB_ID")
    master = ("127.0.0.1", _FIRST_PORT + job % _NUM_PORTS)
    return World(rank, size, rank, size, launcher="submitit", master=master, attempt=f"local:{job}")


def _from_mpi(rank: str, size: str, local_rank: str, local_size: str) -> World:
    """Return the world of a process of mpirun, given the names of its variables.

    Ranks on several machines connect at MASTER_ADDR and MASTER_PORT. On one machine the port is
    drawn from the name of the launch.
    """
    of_rank, of_size, of_local, of_local_size = (
        _number(name) for name in (rank, size, local_rank, local_size)
    )
    drawn = zlib.crc32(launch_name("mpi").encode()) % _NUM_PORTS
    master = ("127.0.0.1", _FIRST_PORT + drawn)
    if "MASTER_ADDR" in os.environ:
        master = (os.environ["MASTER_ADDR"], _number("MASTER_PORT", _FIRST_PORT))
    elif of_size > of_local_size:
        raise UserError(
            f"mpirun started {of_size} ranks on several machines: set MASTER_ADDR to the host of "
            "rank 0 and MASTER_PORT to a free port there (mpirun -x MASTER_ADDR=... with Open MPI)"
        )
    attempt = f"mpi:{master[0]}:{master[1]}"
    return World(
        of_rank, of_size, of_local, of_local_size, launcher="mpi", master=master, attempt=attempt
    )


def launch_name(launcher: str) -> str:
    """Return a name of this launch that its ranks on this machine share, to tell it from others.

    With srun it is the number of the step within its job, so launches of two jobs may have the same
    name; with Open MPI the namespace. For other launchers, whose children are the ranks, it is
    ``child of PID``.
    """
    variable = {"slurm": "SLURM_STEP_ID", "mpi": "PMIX_NAMESPACE"}.get(launcher, "")
    return os.environ.get(variable) or f"child of {os.getppid()}"


def slurm_attempt() -> str:
    """Return an identifier of this attempt of the SLURM job, the same in batch script and tasks."""
    return f"slurm:{os.environ['SLURM_JOB_ID']}:{_number('SLURM_RESTART_COUNT', 0)}"


def is_ignored(number: int) -> bool:
    """Return True if this process ignores the signal, as under nohup."""
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
    """Return the first host of a SLURM node list, such as ``r1n07`` of ``r[1-2]n[07-09,12],cpu1``.

    Raises:
        UserError: If the list names no host.
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", hosts)  # up to the first comma outside brackets
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")
    if not host:
        raise UserError(f"SLURM_STEP_NODELIST={hosts!r} names no host")
    return host


def expand_counts(tasks: str) -> list[int]:
    """Return the number of tasks per node, such as ``[2, 2, 1]`` for SLURM's ``2(x2),1``.

    Raises:
        UserError: If it is not a list of counts.
    """
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={tasks!r} is not a list of counts")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
