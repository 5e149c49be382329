"""``selftask eval suite`` as a SLURM job, submitted with submitit."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit.core.utils import DelayedSubmission

from selftask.checkpoint.rotation import step_of
from selftask.config.trust import take_trust
from selftask.data.loading.open_data import open_received
from selftask.errors import RunError, UserError
from selftask.logs.checkpoint_results import FOLDER, CheckpointResults
from selftask.slurm import queue
from selftask.slurm.batch_epilogue import ENDED
from selftask.slurm.job import executor, submit
from selftask.slurm.partitions import chosen
from selftask.slurm.plan import derived_options

if TYPE_CHECKING:
    from selftask.cli.model.suite_request import Request
    from selftask.config.schema import Config


@dataclass
class SuiteJob:
    """``selftask eval suite`` as a picklable callable for submitit."""

    words: list[str]  # arguments of `selftask eval suite`
    folder: str  # working directory of the submission
    out: str  # folder in which the job's end is recorded; not the run folder itself
    config: dict[str, Any]  # the section `launch`, for the epilogue of the job

    def __call__(self) -> None:
        """Run the evaluations on the node.

        Raises:
            RunError: If the command failed.
        """
        os.chdir(self.folder)
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        from selftask.cli.main import main

        code = main(["eval", "suite", *self.words])
        if code:
            raise RunError(f"{ENDED}{code}: see the log of the job in {self.out}/slurm")

    def checkpoint(self) -> DelayedSubmission:
        """Return this job, to be run again after a requeue."""
        return DelayedSubmission(self)

    __submitit_checkpoint__ = checkpoint  # submitit 1.5.4 uses both names


def submit_suite(request: Request, config: Config, *, each: bool, follow: bool = False) -> str:
    """Submit a job for the evaluations that have no result yet, and return its id.

    The id of an array is that without the index.

    Args:
        request: The requested evaluations.
        config: Config of the run, with ``launch.slurm`` of the command line.
        each: Submit an array with one job for each checkpoint, not one job for all.
        follow: Let the job wait for new checkpoints until the run has ended.

    Raises:
        UserError: If there is nothing to evaluate, an earlier job is still queued, or SLURM refuses
            the job.
    """
    trust = take_trust(list(request.words))[1]
    open_received(config, trust=trust)  # reports mistakes before the job is submitted
    out = request.run.absolute() / FOLDER
    results = CheckpointResults(request.run, request.settings)
    steps = [step_of(path) for path in request.chosen()]
    steps = [step for step in steps if results.missing(step, request.evaluations)]
    if not steps and not follow:
        raise UserError(
            f"{request.run}: nothing to evaluate: every chosen checkpoint has its results, which "
            "the same command without --slurm prints"
        )
    _check_idle(request.run)
    launch = replace(config.launch, nodes=1, processes=1)
    config = replace(config, launch=launch)
    partitions = chosen(launch)
    derived, _, _ = derived_options(config, partitions)
    made = executor(launch, out / "slurm", f"{request.run.name}-evaluations", **derived)
    patterns = list(map(str, steps)) if each else [request.checkpoints]
    options = ["--follow"] if follow else []
    jobs = [_job(request, config, [f"checkpoints={one}", *options], out) for one in patterns]
    handed_in = submit(jobs, made)
    queue.note_suite(request.run, [job.job_id for job in handed_in])
    return handed_in[0].job_id.partition("_")[0]


def _check_idle(run: Path) -> None:
    """Raise UserError if an earlier job is still in the queue."""
    for job, state in queue.queue(queue.suite_jobs(run)).items():
        if queue.is_waiting(state):
            raise UserError(
                f"{run}: job {job} ({state}) evaluates its checkpoints already; "
                f"`selftask cancel {job}` first, or wait"
            )


def _job(request: Request, config: Config, more: list[str], out: Path) -> SuiteJob:
    words = [
        str(request.run.absolute()),
        *request.evaluations,
        *request.words,
        f"every={request.every}",
        *more,
    ]
    launch = config.to_dict()["launch"]
    return SuiteJob(words, str(Path.cwd()), str(out), {"launch": launch})
