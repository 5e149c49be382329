"""State and requeueing of the SLURM job to which this process belongs.

Used by the ranks after a stop signal, and by the batch script (``slurm.batch_epilogue``) after
ranks have died. Does not import torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from selftask.config.schema import LaunchConfig
from selftask.logs import read_json, write_json

REQUEUES = Path("errors", "requeues.json")  # in the run folder: requeues by job id
TRY_AGAIN = 75  # EX_TEMPFAIL
LOCAL_REQUEUES = "SELFTASK_LOCAL_REQUEUES"  # requeues of a local job until now
_MOST_LOCAL = 5  # requeues by submitit's local executor, which starts a job six times
_ASKING = ("SIGTERM", "SIGUSR2", "a signal on another rank")  # possibly sent by the scheduler


@dataclass(frozen=True)
class ExitDecision:
    """State, stop reason, log message and exit code of an interrupted run."""

    state: str  # requeued | interrupted
    by: str  # stop reason, such as the name of a signal
    outlook: str  # how the run continues, for the log
    code: int


@dataclass(frozen=True)
class Job:
    """The SLURM job of this process, as reported by the controller."""

    id: str
    state: str  # RUNNING, COMPLETING, PENDING, ...
    reason: str
    restarts: int  # restarts until now
    attempt: int  # restarts at the start of this process
    batch: bool  # False for an interactive job, which cannot be requeued

    @property
    def requeued(self) -> bool:
        """True if SLURM has already requeued the job, as after preemption or a node failure."""
        return self.restarts > self.attempt

    @property
    def cancelled(self) -> bool:
        """True if the job is ending without a requeue, and not because of its time limit."""
        return not self.requeued and self.state != "RUNNING" and self.reason != "TimeLimit"


def current_job() -> Job | None:
    """Return the job of this process; None outside SLURM or if the controller does not answer."""
    job_id = job_name()
    if job_id is None:
        return None
    done = command("scontrol", "show", "job", "--oneliner", job_id)
    if done.returncode != 0:
        return None
    fields = dict(re.findall(r"(?:^| )(\w+)=(\S*)", done.stdout.splitlines()[0]))
    return Job(
        id=job_id,
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        restarts=int(fields.get("Restarts", 0)),
        attempt=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
        batch=fields.get("BatchFlag") == "1",
    )


def job_name() -> str | None:
    """Return the job id for SLURM's commands (``12``, or ``12_3`` in an array), or None."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)
    return os.environ.get("SLURM_JOB_ID")


def in_local_job() -> bool:
    """Return True in a job of submitit's local executor."""
    return "SUBMITIT_LOCAL_JOB_ID" in os.environ


def depart(by: str, launch: LaunchConfig, out: Path, *, first: bool) -> ExitDecision:
    """Requeue the job of an interrupted run if possible, and return how the run exits.

    Every rank must call this function. In a SLURM job, after a signal that SLURM may have sent,
    this process ignores SIGTERM and SIGUSR2, since SLURM sends them right after a requeue.

    Args:
        by: Stop reason, such as the name of a signal.
        launch: Limits the number of requeues; requeues by SLURM itself, such as after a preemption,
            do not count.
        out: The run folder, where requeues are counted.
        first: True on rank 0, which requeues the job unless it is already requeued or cancelled.

    Returns:
        The decision. In a SLURM job, after a signal that SLURM may have sent, other ranks than 0
        always report a requeue, since only rank 0 knows whether it succeeds.
    """
    stop = getattr(signal, by, None)
    code = TRY_AGAIN if stop is None else 128 + int(stop)
    alone = ExitDecision("interrupted", by, "the same command resumes it", code)
    if in_local_job():  # perhaps inside a SLURM job, which is not that of the run
        return _local_requeue(by, launch, alone) if by == "SIGUSR2" else alone
    if by not in _ASKING or job_name() is None:
        return alone
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not first:
        return ExitDecision("requeued", by, "rank 0 sees to the queue", 0)
    job = current_job()
    if job is None or not job.batch:
        return alone
    if job.requeued:
        return ExitDecision("requeued", by, f"SLURM has put job {job.id} back into the queue", 0)
    if job.cancelled:
        outlook = f"job {job.id} was cancelled: {alone.outlook}"
        return replace(alone, by="scancel", outlook=outlook)
    return _requeued(job, by, launch, out, alone)


def _local_requeue(by: str, launch: LaunchConfig, alone: ExitDecision) -> ExitDecision:
    """Return "requeued" while requeues remain, otherwise ``alone`` with the reason.

    submitit requeues if any rank requests it, so the result must not depend on the rank.
    """
    most = min(launch.max_requeues, _MOST_LOCAL)
    remaining = most - int(os.environ.get(LOCAL_REQUEUES, "0"))
    if remaining > 0:
        outlook = f"the local job starts it again; {remaining - 1} of {most} requeues left"
        return ExitDecision("requeued", by, outlook, 0)
    limit = f"launch.max_requeues={most}" if most < _MOST_LOCAL else f"the limit of {most} requeues"
    return replace(alone, outlook=f"{limit} is used up: {alone.outlook}")


def _requeued(
    job: Job, by: str, launch: LaunchConfig, out: Path, alone: ExitDecision
) -> ExitDecision:
    remaining = launch.max_requeues - requeues(job, out)
    if remaining <= 0:
        limit = f"launch.max_requeues={launch.max_requeues}"
        return replace(alone, outlook=f"{limit} is used up: {alone.outlook}")
    if problem := requeue(job, out):
        failure = f"job {job.id} could not be requeued ({problem})"
        return replace(alone, outlook=f"{failure}: {alone.outlook}")
    outlook = (
        f"job {job.id} is back in the queue; {remaining - 1} of {launch.max_requeues} requeues left"
    )
    return ExitDecision("requeued", by, outlook, 0)


def requeue(job: Job, out: Path) -> str:
    """Requeue the job under the same id and count it; return an error message, "" for success."""
    done = command("scontrol", "requeue", job.id)
    if done.returncode != 0:
        code = f"scontrol ended with code {done.returncode}"
        return (done.stderr or done.stdout).strip() or code
    path = out / REQUEUES
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**read_json(path), job.id: requeues(job, out) + 1})
    return ""


def requeues(job: Job, out: Path) -> int:
    """Return how often selftask, not SLURM itself, has requeued the job of a run."""
    count = read_json(out / REQUEUES).get(job.id, 0)
    return count if isinstance(count, int) else 0


def command(*words: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run a command; its ``returncode`` is 127 if it is missing or exceeds ``timeout_s``."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))
