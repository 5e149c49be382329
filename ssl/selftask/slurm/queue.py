"""Jobs of submitted runs and their states."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import time
from calendar import timegm
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from selftask.errors import UserError, shorten
from selftask.files.received import UnreadableFile
from selftask.logs import read_json, write_json
from selftask.logs.tails import last_line
from selftask.report.overview.run_line import RunLine, read_line, unreadable
from selftask.run.slurm_job import command

_QUEUED = (
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"),
    *("RESV_DEL_HOLD", "SPECIAL_EXIT"),
)
_STARTED = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT")
_PAUSED = ("SUSPENDED", "STOPPED")
WAITING = (*_QUEUED, *_STARTED, *_PAUSED)  # states of SLURM's jobs that have not ended
LOCAL = "local-"  # prefix of the id of a job on this machine, followed by its process id
JOBS = Path("slurm", "jobs.json")  # in the folder of a run or sweep
_ID = re.compile(r"[1-9]\d{0,17}(_\d{1,9})?|local-[1-9]\d{0,9}", re.ASCII)
_CONTROLLER = "submitit.local._local"  # module that runs a local job; its argument is the folder
_POLL_S = 30.0  # between two polls of the queue
_SKEW_S = 60  # largest difference expected between the clocks of this machine and a file server
SUITE_JOBS = Path("evaluations", "slurm", "suite_jobs.json")  # in the folder of a run
CONTROLLER_ERRORS = "controller.err"  # error output of the processes that start a local job's ranks


def note(out: Path, job_ids: dict[Path, str]) -> None:
    """Record the job of each run in ``out/slurm/jobs.json``; a new job replaces the old one.

    Args:
        out: Folder of the run or sweep.
        job_ids: Run folder -> job id.
    """
    path = out / JOBS
    runs = {**read_json(path), **{str(run): job for run, job in job_ids.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, runs)


def noted(out: Path) -> dict[Path, str]:
    """Return run folder -> job id for the run or sweep in ``out``; empty if it was not submitted.

    For a single run of a sweep, the result has only that run.

    Raises:
        UnreadableFile: If the record was not written by selftask.
    """
    runs = _recorded(out)
    if runs:
        return runs
    folder = out.resolve()
    return {run: job for run, job in _recorded(out.parent).items() if run.resolve() == folder}


def _recorded(out: Path) -> dict[Path, str]:
    """Return run folder -> job id, as recorded in a folder, of the runs in and below it.

    Runs elsewhere are left out: the folder is then a copy, and the jobs belong to the original.

    Raises:
        UnreadableFile: If the file is not one that ``note`` writes.
    """
    path = out / JOBS
    jobs = read_json(path)
    for run, job in jobs.items():
        if not isinstance(job, str) or not is_job(job) or not Path(run).is_absolute():
            raise UnreadableFile(path, f"{shorten(repr(job), 60)} is no job id")
    folder = out.resolve()
    runs = {Path(run): job for run, job in jobs.items()}
    return {run: job for run, job in runs.items() if run.resolve().is_relative_to(folder)}


def is_job(text: str) -> bool:
    """Return whether a text is a job id: ``12``, ``12_3`` in an array, or ``local-1234``."""
    return _ID.fullmatch(text) is not None


def is_waiting(state: str) -> bool:
    """Return whether a job in this state, such as ``PENDING (Priority)``, has not ended."""
    return state.partition(" ")[0] in WAITING


def check_idle(out: Path) -> None:
    """Raise UserError if a job of this run is still in the queue."""
    runs = noted(out)
    if not runs:
        return
    states = queue(list(runs.values()))
    for run, job in runs.items():
        if is_waiting(states.get(job, "")):
            raise UserError(
                f"out={out}: job {job} ({states[job]}) makes {run} already; "
                f"`selftask cancel {shlex.quote(str(out))}` first, or use another out="
            )


def find(outs: list[Path]) -> list[Path]:
    """Return the given folders, or without any, all submitted runs and sweeps below ``runs``.

    Raises:
        UserError: If a given folder was not submitted.
    """
    if outs:
        for out in outs:
            if not (any(jobs_of([out])) or suite_jobs(out)):
                raise UserError(f"{out}: no submitted run or sweep lies there (no slurm/jobs.json)")
        return outs
    runs = Path("runs")
    folders = {path.parents[1] for path in runs.glob("**/slurm/jobs.json")}
    return sorted(folders | {path.parents[2] for path in runs.glob(f"**/{SUITE_JOBS}")})


def note_suite(run: Path, jobs: Iterable[str]) -> None:
    """Record the jobs of ``eval suite`` for a run; they replace those of an earlier command."""
    write_json(run / SUITE_JOBS, {"run": str(run.resolve()), "jobs": [*jobs]})


def suite_jobs(run: Path) -> list[str]:
    """Return the ids of the jobs that evaluate the checkpoints of a run (``eval suite``).

    The list is empty if the record names another run, since the folder is then a copy. Local jobs
    are omitted.
    """
    record = read_json(run / SUITE_JOBS)
    jobs = record.get("jobs")
    if not isinstance(jobs, list) or record.get("run") != str(run.resolve()):
        return []
    return [job for job in map(str, jobs) if is_job(job) and not _is_local(job)]


def jobs_to_cancel(out: Path) -> dict[str, Path | None]:
    """Return job id -> run folder for a run or sweep, and for its ``eval suite`` jobs.

    If any of them is queued or running, only such jobs are returned: others may have ended long
    ago, and a job that has ended cannot be cancelled. Otherwise, the jobs of the runs are returned
    without those of ``eval suite``.
    """
    runs = noted(out)
    suites = {job: run for run in dict.fromkeys([out, *runs]) for job in suite_jobs(run)}
    jobs: dict[str, Path | None] = {job: run for run, job in runs.items()}
    states = queue([*jobs, *suites])
    waiting = {job for job, state in states.items() if is_waiting(state)}
    return {job: run for job, run in {**jobs, **suites}.items() if job in waiting} or jobs


def run_lines(outs: list[Path]) -> list[RunLine]:
    """Return a line for each run, with its job and the state from its files and from SLURM.

    The jobs of ``eval suite`` for these runs follow, with the folder of their results, and then the
    folders whose record of jobs cannot be read.
    """
    return _lines_and_states(outs)[0]


def _lines_and_states(outs: list[Path]) -> tuple[list[RunLine], dict[str, str], bool]:
    """Return the result of ``run_lines``, the states of the jobs, and whether they are complete.

    They are not if squeue fails and a job is known to no other program: it may still be queued.
    """
    runs, unread = jobs_of(outs)
    suites = {job: run for run in dict.fromkeys([*outs, *runs]) for job in suite_jobs(run)}
    jobs = [*runs.values(), *suites]
    states, answers = _poll(jobs)  # before the files: the line of an ended job is its last
    lines = [with_job(read_line(run), job, states.get(job, "")) for run, job in runs.items()]
    lines += [_line_of_suite(run, job, states.get(job, "")) for job, run in suites.items()]
    return [*lines, *unread], states, answers or states.keys() >= set(jobs)


def as_completed(outs: list[Path]) -> Iterator[RunLine]:
    """Yield the line of each job, as in ``run_lines``, once it has ended and is not requeued.

    Args:
        outs: Folders of submitted runs and sweeps.
    """
    ended: set[str] = set()
    while True:
        lines, states, is_complete = _lines_and_states(outs)
        if not is_complete:
            time.sleep(_POLL_S)
            continue
        waiting = {job for job, state in states.items() if is_waiting(state)}
        yield from (line for line in lines if line.job not in waiting | ended)
        ended |= {line.job for line in lines} - waiting
        if not waiting:
            return
        time.sleep(_POLL_S)


def jobs_of(outs: Iterable[Path]) -> tuple[dict[Path, str], list[RunLine]]:
    """Return run folder -> job id, and a line for each folder whose record cannot be read."""
    jobs: dict[Path, str] = {}
    unread = []
    for out in outs:
        try:
            jobs |= noted(out)
        except UnreadableFile as error:
            unread.append(unreadable(out, error))
    return jobs, unread


def _line_of_suite(run: Path, job: str, in_slurm: str) -> RunLine:
    """Return the line of an evaluation job: its state in SLURM and the last line of its log."""
    folder = run / SUITE_JOBS.parts[0]
    state = in_slurm.lower() or "ended"
    return RunLine(folder, state, job=job, last_line=last_error(folder, job))


def with_job(line: RunLine, job: str, in_slurm: str) -> RunLine:
    """Return the line with its job added, and the states of run and job combined.

    Args:
        line: Line with the state from the files of the run.
        job: Id of its job.
        in_slurm: State of the job, such as ``PENDING (Priority)``; empty if unknown to SLURM.
    """
    of_run = line.state
    first = in_slurm.partition(" ")[0]
    if first in _QUEUED:
        state = in_slurm.lower() if of_run == "not started" else f"{of_run}, {in_slurm.lower()}"
    elif of_run == "running" and first in ("", "gone"):
        state = of_run  # by its files; SLURM does not answer, or a local job is on another machine
    elif first in _STARTED:
        state = of_run if of_run in ("running", "hung", "finished", "failed") else first.lower()
    elif first in _PAUSED:  # its files look like those of a hanging run
        state = of_run if of_run in ("finished", "failed") else first.lower()
    elif of_run in ("running", "hung", "lost", "requeued", "not started"):  # ended without a status
        state = f"lost: job {in_slurm.lower() or 'unknown to SLURM'}"
        state = "cancelled" if first == "CANCELLED" else state
        error = last_error(line.folder, job)
        line = replace(line, note=line.note or error, last_line=line.last_line or error)
    else:
        state = of_run
    return replace(line, job=job, state=state)


def last_error(run: Path, job: str) -> str:
    """Return the last line that a job of a run wrote to its error log, or an empty string."""
    number = job.removeprefix(LOCAL)
    names = [CONTROLLER_ERRORS] if _is_local(job) else []
    names += [f"{number}_0_log.err"] if is_job(job) else []
    texts = [
        last_line(folder / "slurm" / name)
        for folder in (run, run.parent)  # the folder of a sweep
        for name in reversed(names)
    ]
    return next(filter(None, texts), "")


def queue(ids: list[str]) -> dict[str, str]:
    """Return job id -> SLURM state, such as ``RUNNING`` or ``PENDING (Priority)``.

    Queued jobs are read from ``squeue``, ended ones from ``sacct`` if the cluster has accounting,
    else recent ones from ``scontrol``. Jobs unknown to SLURM are omitted. A local job is
    ``RUNNING``, or ``gone`` if no process of this machine runs it.
    """
    return _poll(ids)[0]


def _poll(ids: list[str]) -> tuple[dict[str, str], bool]:
    """Return the result of ``queue``, and False if squeue does not answer."""
    ids = [job for job in ids if isinstance(job, str) and is_job(job)]
    squeue = ("squeue", "--noheader", "--array", "--format=%i|%T|%r", "--me")
    done = command(*squeue, timeout_s=60)
    listed = done.stdout.splitlines() if done.returncode == 0 else []
    answers = done.returncode == 0 or shutil.which("squeue") is None
    local = [job for job in ids if _is_local(job)]
    states = {job: "RUNNING" if _controlled_folder(job) else "gone" for job in local}
    for job, state, reason in (line.split("|", 2) for line in listed if line.count("|") > 1):
        states[job.strip()] = f"{state} ({reason})" if state == "PENDING" else state
    accounting = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State")
    if ended := [job for job in ids if job not in states]:
        listed = lines(*accounting, "-j", ",".join(ended))
        states |= dict(line.split("|", 1) for line in listed if "|" in line)
    for job in ended:
        if job not in states:  # scontrol takes one job at a time
            shown = " ".join(lines("scontrol", "show", "job", "--oneliner", job))
            if of_job := re.findall(r"(?:^| )JobState=(\S*)", shown):
                states[job] = of_job[0]
    return {job: states[job] for job in ids if job in states}, answers


def cancel(jobs: Mapping[str, Path | None]) -> None:
    """Cancel jobs.

    Args:
        jobs: Job id -> its run folder, or None for a SLURM job id given by the user.

    Raises:
        UserError: If an id is invalid, a local job is not running on this machine, or ``scancel``
            is missing or fails.
    """
    for job, run in jobs.items():
        if not is_job(job):
            raise UserError(f"{job!r}: is no job id")
        if _is_local(job):
            _cancel_local(job, run)
    ids = [job for job in jobs if not _is_local(job)]
    if not ids:
        return
    if shutil.which("scancel") is None:
        raise UserError(f"{', '.join(ids)}: this machine has no SLURM (there is no scancel)")
    done = command("scancel", "--", *ids, timeout_s=60)
    if done.returncode != 0:
        raise UserError(f"scancel {' '.join(ids)}: {done.stderr.strip()}")


def _is_local(job: str) -> bool:
    return job.startswith(LOCAL)


def _cancel_local(job: str, run: Path | None) -> None:
    """Send SIGTERM to the ranks of a local job, so that they save a checkpoint and stop.

    Raises UserError if the process is not the job of this run, for example if its process id has
    been reused.
    """
    pid = job.removeprefix(LOCAL)
    folder = _controlled_folder(job)
    logs = [] if run is None else [run / "slurm", run.parent / "slurm"]
    if folder is None or folder.resolve() not in [log.resolve() for log in logs]:
        raise UserError(f"{job}: is not running on this machine")
    started = lines("pgrep", "-P", pid, "-f", _CONTROLLER)  # child of the set-up shell
    try:
        os.kill(int(started[0] if started else pid), signal.SIGTERM)
    except ProcessLookupError:
        raise UserError(f"{job}: is not running on this machine") from None


def _controlled_folder(job: str) -> Path | None:
    """Return the log folder of a running local job, read from its command line, or None.

    None means that the process does not exist, is not a local job, or started after the job was
    recorded (its process id has been reused).
    """
    shown = ("-ww", "-o", "lstart=", "-o", "command=", "-p", job.removeprefix(LOCAL))
    # English dates, in UTC, since an hour of local time comes twice a year; with plain C, ps
    # replaces letters that are not ASCII
    line = next(iter(lines("env", "LC_ALL=C.UTF-8", "TZ=UTC0", "ps", *shown)), "")
    began, _, argument = line.partition(f" {_CONTROLLER} ")
    if not argument:
        return None
    words = " ".join(began.split()[:5])  # Tue Nov 24 05:28:53 2026
    try:
        # the command line of a shell has quotes
        folder = Path(argument if argument.startswith("/") else shlex.split(argument)[0])
        started_s = timegm(time.strptime(words, "%a %b %d %H:%M:%S %Y"))
        recorded_s = (folder / JOBS.name).stat().st_mtime
    except (OSError, ValueError):
        return None
    return folder if started_s <= recorded_s + _SKEW_S else None


def lines(*words: str) -> list[str]:
    """Return the output lines of a command; an empty list if it fails or is missing."""
    done = command(*words, timeout_s=60)
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
