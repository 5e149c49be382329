"""Epilogue of the batch script: ``python -m selftask.slurm.batch_epilogue CODE FOLDER``.

It runs after srun has failed, since killed ranks cannot report their end. It corrects
``status.json`` and the last log line, and may requeue the job: up to ``launch.max_requeues`` times
if a rank was lost (killed from outside, or node failure), and up to ``launch.max_restarts`` times
after other failures, except errors that the user must fix. Does not import torch.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from submitit.core import utils as submitit_files

from selftask.config.schema import LaunchConfig
from selftask.distributed.world import slurm_attempt
from selftask.logs import read_json, write_json
from selftask.logs.events import add_event
from selftask.logs.lines import add_line
from selftask.run.early_errors import find_early_error
from selftask.run.run_folder import is_held
from selftask.run.slurm_job import Job, current_job, job_name, requeue, requeues

if TYPE_CHECKING:
    from selftask.slurm.job import Submission

MARK = "selftask: attempt "  # the batch script writes it to the log before each srun
_ENDED = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
_OUT_OF_MEMORY = re.compile(r"\b(?:oom|OOM)[-_ ][kK]ill|Out Of Memory")  # not "room"
_NODE = re.compile(r"srun: error: (Node failure on \S+)")
_UNREPORTED = ("running", "failed", None)  # states that may need a correction
ENDED = "the run ended with code "  # in a rank's error message, followed by the code
USER_ERROR, USR2 = 2, 128 + 12


def after(code: int, folder: Path, job: Job | None) -> int:
    """Record the end of an attempt and requeue the job if allowed.

    Args:
        code: Exit code of srun.
        folder: submitit's folder of the job.
        job: The job as reported by the controller, or None if unknown.

    Returns:
        The exit code of the job; 0 after a requeue.
    """
    name = job_name() or "unknown"
    paths = submitit_files.JobPaths(folder, job_id=name)
    delayed = submitit_files.DelayedSubmission.load(paths.submitted_pickle)
    submission = cast("Submission", delayed.function)
    record = Record(Path(submission.out), slurm_attempt())
    if code == 0 or record.state not in _UNREPORTED or is_held(record.out):
        return code  # if another run holds the folder, the ranks have reported it
    launch = LaunchConfig(**submission.config["launch"])
    if job is not None and job.requeued:
        record.write("requeued", f"RUN interrupted; SLURM has put job {name} back into the queue")
        _forget_results(paths)
        return 0
    if job is not None and job.cancelled:
        text = f"RUN interrupted by scancel; job {name} was cancelled: the same command resumes it"
        record.write("interrupted", text, by="scancel")
        return code
    cause, lost = _cause(code, paths.stderr, record)
    again = _next_attempt(code, lost, job, launch, record, paths)
    problem = requeue(job, record.out) if again and job is not None else ""
    if again and not problem:
        text = f"job {name} is back in the queue; {again}"
        record.write("requeued", f"RUN interrupted: {cause}; {text}", by=cause)
        _forget_results(paths)
        return 0
    if not record.reports_failure() or problem:
        more = f"; it could not be requeued: {problem}" if problem else ""
        record.write("failed", f"RUN FAILED: {cause}{more}", error=cause)
    _write_missing_results(paths, launch.world_size, str(record.content.get("error") or cause))
    return code


def _next_attempt(
    code: int,
    lost: bool,
    job: Job | None,
    launch: LaunchConfig,
    record: Record,
    paths: submitit_files.JobPaths,
) -> str:
    """Return a text on the remaining attempts, or an empty string if the job must not restart.

    A failure that uses up one of ``launch.max_restarts`` is counted.
    """
    if job is None:
        return ""
    early = code == USR2  # the signal before the time limit came before Python had a handler
    if not early and _has_user_error(paths):
        return ""
    if lost or early:
        remaining = launch.max_requeues - requeues(job, record.out)
        of = f"{launch.max_requeues} requeues"
    else:
        remaining = launch.max_restarts - record.failures(job.id)
        of = f"{launch.max_restarts} restarts"
        if remaining > 0:
            record.count_failure(job.id)
    return f"{remaining - 1} of {of} left" if remaining > 0 else ""


def _has_user_error(paths: submitit_files.JobPaths) -> bool:
    """Return True if a rank ended with a UserError, which a restart cannot fix."""
    texts = [submitit_files.pickle_load(path) for path in _results(paths)]
    return any(f"{USER_ERROR}: " in str(text).partition(ENDED)[2][:4] for _, text in texts)


class Record:
    """Status, log and failure count of a run, edited from outside the run."""

    def __init__(self, out: Path, attempt: str) -> None:
        self.out = out
        self.content: dict[str, Any] = _read(out / "status.json")
        self.attempt = attempt
        fresh = self.content.get("attempt") == self.attempt
        self.state = self.content.get("state") if fresh else None  # None: from an earlier attempt

    def write(self, state: str, line: str, **more: Any) -> None:
        """Write a new state and its log line.

        Args:
            state: The new state.
            line: The line, which is appended to the log and printed.
            **more: Other entries of ``status.json``.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        kept = {key: self.content[key] for key in self.content.keys() - {"error", "lost"}}
        self.content = {**kept, "state": state, "updated": time.time(), **more}
        write_json(self.out / "status.json", self.content)
        add_line(self.out, line)
        kind = {"requeued": "requeue", "interrupted": "stop"}.get(state, "failure")
        add_event(self.out, kind, line, step=int(self.content.get("step", 0)))
        print(line, flush=True)

    def reports_failure(self) -> bool:
        """Return True if both status and log report the failure."""
        log = self.out / "log.txt"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        last = text.rstrip().rpartition("\n")[2]
        return self.state == "failed" and "RUN FAILED" in last

    def failures(self, job: str) -> int:
        """Return the number of restarts of a job after failures."""
        return int(_read(self._failures).get(job, 0))

    def count_failure(self, job: str) -> None:
        self._failures.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._failures, {**_read(self._failures), job: self.failures(job) + 1})

    @property
    def _failures(self) -> Path:
        return self.out / "errors" / "restarts.json"


def _cause(code: int, log: Path, record: Record) -> tuple[str, bool]:
    """Return why the last attempt ended, and whether a rank was lost other than by out-of-memory.

    The cause is from the run's own report if there is one, otherwise from srun's message about the
    first task that ended.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    text = text.rpartition(MARK)[2]
    no_memory = _OUT_OF_MEMORY.search(text) is not None
    if record.state == "failed":
        cause = str(record.content.get("error")).partition("\n")[0]
        return cause, bool(record.content.get("lost")) and not no_memory
    early = find_early_error(record.out, record.attempt)
    if early is not None:
        return f"rank {early.rank}: {early.message}", False
    if match := _NODE.search(text):
        return match[1].lower(), True
    if not (ended := _ENDED.search(text)):
        return f"srun left with code {code}; see {log}", False
    host, ranks, how = ended.groups()
    words = {"Killed": "was killed (SIGKILL)", "Out Of Memory": "was killed: out of memory"}
    crash = f"crashed ({how})" if "fault" in how else f"ended ({how})"
    cause = f"rank {ranks} on {host} {words.get(how, crash)}"
    return cause, how == "Killed" and not no_memory


def _forget_results(paths: submitit_files.JobPaths) -> None:
    """Delete the results of a requeued attempt, so that ``job.result()`` ignores them."""
    for path in _results(paths):
        path.unlink(missing_ok=True)


def _results(paths: submitit_files.JobPaths) -> list[Path]:
    return list(paths.folder.glob(f"{paths.job_id}_*_result.pkl"))


def _write_missing_results(paths: submitit_files.JobPaths, ranks: int, cause: str) -> None:
    """Write an error result for killed ranks; otherwise ``job.result()`` would wait forever."""
    for rank in range(ranks):
        path = submitit_files.JobPaths(paths.folder, paths.job_id, rank).result_pickle
        if not path.exists():
            with submitit_files.temporary_save_path(path) as temporary:
                submitit_files.cloudpickle_dump(("error", f"RUN FAILED: {cause}"), temporary)


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError):  # an unreadable file must not prevent a requeue
        return read_json(path)
    return {}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM sends it after `requeue`
    sys.exit(after(int(sys.argv[1]), Path(sys.argv[2]), current_job()))
