"""Inside a SLURM job: what the scheduler means to do with it, and how it gets back to the queue.

Free of torch. Two callers: rank 0, when a signal has stopped the run; and the job's batch script
(``slurm.batch_epilogue``) when ranks have died, rank 0 perhaps among them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass

from selftask.config.schema import LaunchConfig

TRY_AGAIN = 75  # EX_TEMPFAIL
_ASKING = ("SIGTERM", "SIGUSR2", "a signal on another rank")  # what a scheduler stops a run by


@dataclass(frozen=True)
class ExitDecision:
    """How an interrupted run leaves: the truth for ``status.json``, last line and exit code."""

    state: str  # requeued | interrupted
    by: str
    outlook: str  # how the run goes on
    code: int


@dataclass(frozen=True)
class Job:
    """The job around this process, as the controller sees it now."""

    id: str
    state: str  # RUNNING, COMPLETING, PENDING, ...
    reason: str
    restarts: int  # so far, by the controller
    attempt: int  # restarts before this process was started
    batch: bool  # an interactive job has no queue to go back to

    @property
    def requeued(self) -> bool:
        """Whether it is to start again already: preempted, its node gone, or by ``scontrol``."""
        return self.restarts > self.attempt

    @property
    def cancelled(self) -> bool:
        """Whether it is being ended for good, and not by its time limit."""
        return not self.requeued and self.state != "RUNNING" and self.reason != "TimeLimit"


def current_job() -> Job | None:
    """The job of this process, asked of the controller; None outside, or if nobody answers."""
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
    """The id by which commands know this job (``12``, or ``12_3`` of an array); None outside."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)
    return os.environ.get("SLURM_JOB_ID")


def depart(by: str, launch: LaunchConfig, *, first: bool) -> ExitDecision:
    """Leave a run that was stopped ``by`` a signal and saved: back to the queue where there is one.

    Every rank calls; rank 0 (``first``) asks SLURM, and requeues the job unless it has done so or
    someone has cancelled it. From here on SLURM's own signals are ignored: they follow at once.
    """
    code = _exit_code(by)
    alone = ExitDecision("interrupted", by, "the same command goes on", code)
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
        outlook = f"job {job.id} was cancelled: the same command goes on"
        return ExitDecision("interrupted", "scancel", outlook, code)
    return _requeued(job, by, launch, alone)


def _requeued(job: Job, by: str, launch: LaunchConfig, alone: ExitDecision) -> ExitDecision:
    left = launch.max_requeues - job.attempt
    if left <= 0:
        outlook = f"launch.max_requeues={launch.max_requeues} is used up: the same command goes on"
        return ExitDecision("interrupted", by, outlook, alone.code)
    problem = requeue(job)
    if problem:
        outlook = f"job {job.id} could not be requeued ({problem}): the same command goes on"
        return ExitDecision("interrupted", by, outlook, alone.code)
    outlook = (
        f"job {job.id} is back in the queue; {left - 1} of {launch.max_requeues} requeues left"
    )
    return ExitDecision("requeued", by, outlook, 0)


def requeue(job: Job) -> str:
    """Ask for the job to start again, under the same id; what went wrong, or nothing."""
    done = command("scontrol", "requeue", job.id)
    return (done.stderr or done.stdout).strip() if done.returncode != 0 else ""


def _exit_code(by: str) -> int:
    number = getattr(signal, by, None)
    return 128 + int(number) if number is not None else TRY_AGAIN


def command(*words: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """One of SLURM's commands; a missing one or a silent controller is a failure, too."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))
