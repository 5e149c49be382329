"""``python -m selftask.launch.after CODE FOLDER``: what a batch script does once srun is over.

Ranks that were killed cannot tell, rank 0 perhaps among them; the batch script outlives them all.
It makes ``status.json`` and the last line true, and puts the job back into the queue where
``launch.max_restarts`` allows it. Free of torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

from submitit.core import utils as submitit_files

from selftask.config.schema import LaunchConfig
from selftask.launch.run_folder import is_held
from selftask.launch.slurm import Job, current_job, job_name, requeue
from selftask.logs import add_line, write_json

STARTED = "SELFTASK_ATTEMPT_STARTED"  # set by the batch script, in seconds since 1970
MARK = "selftask: attempt "  # the batch script writes it to the log before each srun
_KILLED = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (Killed|Out Of Memory|.*fault.*)")
_UNTOLD = ("running", "failed", None)  # states that may not be the whole truth
ENDED = "the run ended with code "  # what the error of a rank says, and then the code
USER_ERROR, USR2 = 2, 128 + 12


def after(code: int, folder: Path, job: Job | None) -> int:
    """Judge the attempt that ended with srun's ``code``; the exit code of the job."""
    name = job_name() or "unknown"
    paths = submitit_files.JobPaths(folder, job_id=name)
    delayed = submitit_files.DelayedSubmission.load(paths.submitted_pickle)
    submission = cast(Submitted, delayed.function)
    record = Record(Path(submission.out))
    if code == 0 or record.state not in _UNTOLD or is_held(record.out):
        return code  # of a folder that another run has, this one was told so
    launch = LaunchConfig(**submission.config["launch"])
    if job is not None and job.requeued:
        record.write("requeued", f"RUN interrupted; SLURM has put job {name} back into the queue")
        _forget_results(paths)
        return 0
    if job is not None and job.cancelled:
        text = f"RUN interrupted by scancel; job {name} was cancelled: the same command goes on"
        record.write("interrupted", text, by="scancel")
        return code
    cause = _cause(code, paths.stderr)
    again = job is not None and _may_try_again(code, job, launch, record, paths)
    problem = requeue(job) if again and job is not None else ""
    if again and not problem:
        left = launch.max_restarts - record.failures(name)
        text = f"job {name} is back in the queue; {left} of {launch.max_restarts} restarts left"
        record.write("requeued", f"RUN interrupted: {cause}; {text}", by=cause)
        _forget_results(paths)
        return 0
    if not record.tells_of_failure() or problem:
        more = f"; it could not be requeued: {problem}" if problem else ""
        record.write("failed", f"RUN FAILED: {cause}{more}", error=cause)
    _write_missing_results(paths, launch.world_size, str(record.content.get("error") or cause))
    return code


def _may_try_again(
    code: int, job: Job, launch: LaunchConfig, record: Record, paths: submitit_files.JobPaths
) -> bool:
    """Count the failure, and say whether another attempt is allowed after it."""
    if code == USR2:  # the warning came before python could heed it: no failure of ours
        return job.attempt < launch.max_requeues
    if record.failures(job.id) >= launch.max_restarts or _is_the_users_to_mend(paths):
        return False
    record.count_failure(job.id)
    return True


def _is_the_users_to_mend(paths: submitit_files.JobPaths) -> bool:
    """Whether a rank has said so: another attempt would only say it again."""
    texts = [submitit_files.pickle_load(path) for path in _results(paths)]
    return any(f"{USER_ERROR}: " in str(text).partition(ENDED)[2][:4] for _, text in texts)


class Submitted(Protocol):
    """What is known here of a ``launch.submission.Submission``."""

    out: str
    config: dict[str, Any]


class Record:
    """What a run's folder says about it, read and amended from outside."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.content: dict[str, Any] = _read(out / "status.json")
        started = float(os.environ.get(STARTED, 0))
        fresh = self.content.get("updated", started) >= started
        self.state = self.content.get("state") if fresh else None  # else of an attempt before

    def write(self, state: str, line: str, **more: Any) -> None:
        """Another state, and the line of the log that goes with it."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.content.pop("error", None)
        self.content = {**self.content, "state": state, "updated": time.time(), **more}
        write_json(self.out / "status.json", self.content)
        add_line(self.out, line)
        print(line, flush=True)

    def tells_of_failure(self) -> bool:
        """Whether status and log say so: a killed rank 0 could not."""
        log = self.out / "log.txt"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        last = text.rstrip().rpartition("\n")[2]
        return self.state == "failed" and "RUN FAILED" in last

    def failures(self, job: str) -> int:
        """Attempts of that job that have failed and were made again."""
        return int(_read(self._failures).get(job, 0))

    def count_failure(self, job: str) -> None:
        self._failures.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._failures, {**_read(self._failures), job: self.failures(job) + 1})

    @property
    def _failures(self) -> Path:
        return self.out / "errors" / "restarts.json"


def _cause(code: int, log: Path) -> str:
    """Which ranks were killed in the newest attempt, by srun's own words; else the exit code."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    killed = _KILLED.findall(text.rpartition(MARK)[2])
    if not killed:
        return f"srun left with code {code}; see {log}"
    host, ranks, how = killed[0]
    words = {"Killed": "was killed (SIGKILL)", "Out Of Memory": "was killed: out of memory"}
    return f"rank {ranks} on {host} {words.get(how, f'crashed ({how})')}"


def _forget_results(paths: submitit_files.JobPaths) -> None:
    """Else ``job.result()`` would answer with those of an attempt that does not count."""
    for path in _results(paths):
        path.unlink(missing_ok=True)


def _results(paths: submitit_files.JobPaths) -> list[Path]:
    return list(paths.folder.glob(f"{paths.job_id}_*_result.pkl"))


def _write_missing_results(paths: submitit_files.JobPaths, ranks: int, cause: str) -> None:
    """For ranks that could not: ``job.result()`` raises instead of waiting for ever."""
    for rank in range(ranks):
        path = submitit_files.JobPaths(paths.folder, paths.job_id, rank).result_pickle
        if not path.exists():
            with submitit_files.temporary_save_path(path) as temporary:
                submitit_files.cloudpickle_dump(("error", f"RUN FAILED: {cause}"), temporary)


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    return {}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM sends it with the requeue we ask for
    sys.exit(after(int(sys.argv[1]), Path(sys.argv[2]), current_job()))
