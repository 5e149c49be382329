"""Jobs of submitted runs and their states."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

from selftask.distributed.local_process import is_running
from selftask.errors import UserError
from selftask.logs import read_json, write_json
from selftask.report.overview.run_line import RunLine, read_line
from selftask.run.slurm_job import command

WAITING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "STOPPED")
LOCAL = "local-"  # prefix of the id of a job on this machine, followed by its process id


def note(out: Path, made: dict[Path, str]) -> None:
    """Record the job of each run in ``out/slurm/jobs.json``; a new job replaces the old one.

    Args:
        out: Folder of the run or sweep.
        made: Run folder -> job id.
    """
    path = out / "slurm" / "jobs.json"
    runs = {**read_json(path), **{str(run): job for run, job in made.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, runs)


def noted(out: Path) -> dict[Path, str]:
    """Return run folder -> job id for the run or sweep in ``out``.

    For a single run of a sweep, the result has only that run.
    """
    runs = {Path(run): job for run, job in read_json(out / "slurm" / "jobs.json").items()}
    if runs:
        return runs
    siblings = read_json(out.parent / "slurm" / "jobs.json")
    return {Path(run): job for run, job in siblings.items() if Path(run) == out.resolve()}


def check_idle(out: Path) -> None:
    """Raise UserError if a job of this run is still in the queue."""
    runs = noted(out)
    if not runs:
        return
    states = queue(list(runs.values()))
    for run, job in runs.items():
        if states.get(job, "").split()[:1] and states[job].split()[0] in WAITING:
            raise UserError(
                f"out={out}: job {job} ({states[job]}) makes {run} already; "
                f"`selftask cancel {out}` first, or use another out="
            )


def find(outs: list[Path]) -> list[Path]:
    """Return the given folders, or all submitted runs and sweeps below ``runs``.

    Raises:
        UserError: If a given folder was not submitted.
    """
    if outs:
        for out in outs:
            if not noted(out):
                raise UserError(f"{out}: no submitted run or sweep lies there (no slurm/jobs.json)")
        return outs
    return sorted(path.parents[1] for path in Path("runs").glob("**/slurm/jobs.json"))


def stand(outs: list[Path]) -> list[RunLine]:
    """Return a line for each run, with its job and the state from its files and from SLURM."""
    runs = {run: job for out in outs for run, job in noted(out).items()}
    states = queue(list(runs.values()))
    return [with_job(read_line(run), job, states.get(job, "")) for run, job in runs.items()]


def with_job(line: RunLine, job: str, in_slurm: str) -> RunLine:
    """Return the line with the job, and with the state of the run and its job combined.

    Args:
        line: Line with the state from the files of the run.
        job: Id of its job.
        in_slurm: State of the job, such as ``PENDING (Priority)``; empty if unknown to SLURM.
    """
    own = line.state
    first = in_slurm.partition(" ")[0]
    if first in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        state = in_slurm.lower() if own == "not started" else f"{own}, {in_slurm.lower()}"
    elif first in ("RUNNING", "COMPLETING"):
        state = own if own in ("running", "hung", "finished", "failed") else first.lower()
    elif own in ("running", "hung", "lost", "requeued", "not started"):  # ended without a status
        state = f"lost: job {in_slurm.lower() or 'unknown to SLURM'}"
        state = "cancelled" if first == "CANCELLED" else state
    else:
        state = own
    return replace(line, job=job, state=state)


def queue(ids: list[str]) -> dict[str, str]:
    """Return job id -> SLURM state, such as ``RUNNING`` or ``PENDING (Priority)``.

    Queued jobs are read from ``squeue``, recently ended ones from ``scontrol``, and older ones
    from ``sacct`` if the cluster has accounting. Jobs unknown to SLURM are left out.
    """
    listed = lines("squeue", "--noheader", "--array", "--format=%i|%T|%r", "--me")
    states = {job: _state_of_local(job) for job in ids if _is_local(job)}
    for job, state, reason in (line.split("|", 2) for line in listed if line.count("|") > 1):
        states[job] = f"{state} ({reason})" if state == "PENDING" else state
    for job in ids:
        if job not in states:
            found = [
                word.removeprefix("JobState=")
                for line in lines("scontrol", "show", "job", "--oneliner", job)
                for word in line.split()
                if word.startswith("JobState=")
            ]
            found = found or lines(
                "sacct", "--noheader", "--parsable2", "--allocations", "--format=State", "-j", job
            )
            if found:
                states[job] = found[0]
    return {job: states[job] for job in ids if job in states}


def cancel(ids: list[str]) -> None:
    """Cancel jobs; raise UserError with the message of ``scancel`` if it fails."""
    for job in filter(_is_local, ids):
        _cancel_local(job)
    ids = [job for job in ids if not _is_local(job)]
    if not ids:
        return
    if shutil.which("scancel") is None:
        raise UserError(f"{', '.join(ids)}: this machine has no SLURM (there is no scancel)")
    done = command("scancel", *ids, timeout_s=60)
    if done.returncode != 0:
        raise UserError(f"scancel {' '.join(ids)}: {done.stderr.strip()}")


def _is_local(job: str) -> bool:
    return job.startswith(LOCAL)


def _state_of_local(job: str) -> str:
    return "RUNNING" if is_running(int(job.removeprefix(LOCAL))) else "gone"


def _cancel_local(job: str) -> None:
    """Send SIGTERM to the ranks of a local job, so that they save a checkpoint and stop."""
    pid = job.removeprefix(LOCAL)
    started = lines("pgrep", "-P", pid, "-f", "submitit.local._local")  # child of the set-up shell
    try:
        os.kill(int(started[0] if started else pid), signal.SIGTERM)
    except ProcessLookupError:
        raise UserError(f"{job}: is not running on this machine") from None


def lines(*words: str) -> list[str]:
    """Return the output lines of a SLURM command; an empty list if it fails or is missing."""
    done = command(*words, timeout_s=60)
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
