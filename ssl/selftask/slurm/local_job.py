"""Jobs on this machine, with submitit's local and debug executors.

A local job is a separate process that continues after the command ends. As on a cluster, it starts
the ranks, signals them before the time limit, and restarts them after a requeue.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from submitit import DebugExecutor, LocalExecutor

from selftask.config.checks.sbatch import DEFAULT_MINUTES, minutes, options_of
from selftask.config.schema import Config
from selftask.errors import UserError
from selftask.slurm.job import WARNING, Submission, python_path, signal_delay_s
from selftask.slurm.local_rank import OUT
from selftask.slurm.queue import CONTROLLER_ERRORS, LOCAL


class _Executor(LocalExecutor):
    """submitit's local executor, with ranks that also report failures before their run begins."""

    @property
    def _submitit_command_str(self) -> str:
        words = [sys.executable, "-u", "-m", "selftask.slurm.local_rank", str(self.folder)]
        return shlex.join(words)


def submit_locally(
    configs: Sequence[Config], submissions: Sequence[Submission], folder: Path
) -> list[str]:
    """Start a local job for each run, and return the job ids.

    Args:
        configs: Configs of the runs.
        submissions: The same runs as callables.
        folder: Folder of logs and pickles.

    Raises:
        UserError: If several nodes are requested.
    """
    launch = configs[0].launch
    if launch.nodes > 1:
        raise UserError(f"launch.nodes={launch.nodes}: --cluster local is one machine")
    slurm = options_of(launch.slurm)
    limit = minutes(slurm.get("time")) or DEFAULT_MINUTES
    gpus = _gpus(configs[0], slurm.get("gpus_per_node"))
    folder = folder.absolute()
    executor = _Executor(folder, max_num_timeout=launch.max_requeues)
    setup = list(slurm.get("setup", []))
    if setup:  # the user's lines expect the current folder
        setup = [shlex.join(["cd", os.getcwd()]), *setup, shlex.join(["cd", str(folder)])]
    executor.update_parameters(
        timeout_min=limit,
        tasks_per_node=launch.processes,
        gpus_per_node=len(gpus),
        signal_delay_s=slurm.get("signal_delay_s", signal_delay_s(limit)),
        setup=setup,
    )
    # may be UUIDs; update_parameters accepts numbers only
    executor.parameters["visible_gpus"] = gpus
    jobs = []
    with _detached(folder / CONTROLLER_ERRORS):
        for submission in submissions:
            with _environment_of(submission, folder):
                jobs.append(f"{LOCAL}{executor.submit(submission).job_id}")
    return jobs


@contextmanager
def _environment_of(submission: Submission, folder: Path) -> Iterator[None]:
    """Context that sets the environment variables and current folder of a job's processes.

    They start in the folder of logs and pickles: ``python -m`` puts the current folder first on the
    module search path, and modules of the user's folder must not shadow others. (Python 3.10 has no
    option against it.) The submission itself returns to the user's folder.
    """
    cwd = os.getcwd()
    path = os.environ.get("PYTHONPATH")
    paths = [*python_path(), *map(os.path.abspath, path.split(os.pathsep) if path else ())]
    environment = {"SUBMITIT_PREEMPT_SIGNAL": WARNING, OUT: submission.out}
    environment |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    before = dict(os.environ)
    os.environ |= environment
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(before)


def _gpus(config: Config, asked: Any) -> list[str]:
    """Return the GPUs of the ranks: the first ones visible to this process.

    Args:
        config: Config of the run.
        asked: Value of ``launch.slurm.gpus_per_node``, such as ``2`` or ``a100:2``. None: one GPU
            for each rank, or none if ``train.device`` is ``cpu``.
    """
    if asked is None:
        asked = 0 if config.train.device == "cpu" else config.launch.processes
    count = sum(int(kind.rpartition(":")[2]) for kind in str(asked).split(","))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (list(map(str, range(count))) if seen is None else seen.split(","))[:count]


@contextmanager
def _detached(errors: Path) -> Iterator[None]:
    """Context whose child processes are detached from the terminal's output and signals.

    Args:
        errors: File that their error output is appended to.
    """
    ignored = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGHUP)}
    kept = [os.dup(number) for number in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    try:
        os.dup2(null, 1)
        os.dup2(file, 2)
        yield
    finally:
        for number, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        os.close(null)
        os.close(file)
        for number, handler in ignored.items():
            signal.signal(number, handler)


def run_in_debugger(configs: Sequence[Config], submissions: Sequence[Submission]) -> None:
    """Train in this process; an exception opens pdb at the line that raised it.

    Raises:
        UserError: If several runs or ranks are requested.
    """
    if len(configs) > 1 or configs[0].launch.world_size > 1:
        raise UserError("--cluster debug trains one run in this process: no sweep, no ranks")
    job = DebugExecutor(Path(submissions[0].out) / "slurm").submit(
        _Debugged(**asdict(submissions[0]))
    )
    job.result()


class _Debugged(Submission):
    """A submission that raises errors which a run would otherwise only report."""

    def __call__(self) -> str:
        from selftask.run.run import run_task
        from selftask.task import Task

        run_task(Task(self.read_config()), raises=True)
        return self.out
