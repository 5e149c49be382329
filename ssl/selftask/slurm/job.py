"""The callable of a SLURM job and its sbatch script.

torch is not imported at the top, since a job imports this module first to unpickle its callable.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import site
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission
from submitit.helpers import clean_env
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

import selftask
from selftask.config.checks.sbatch import DEFAULT_MINUTES, SUBMITIT, minutes, options_of
from selftask.config.schema import Config, LaunchConfig
from selftask.errors import RunError, UserError
from selftask.run.slurm_job import LOCAL_REQUEUES, in_local_job
from selftask.slurm.batch_epilogue import ENDED, MARK

WARNING = "USR2"  # signal before the time limit, on which runs save and requeue
# Set by other launchers; sbatch would copy them from the environment of the submission.
_OF_LAUNCHERS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"


def signal_delay_s(limit: int) -> int:
    """Return the default time between the warning signal and the time limit, in seconds.

    In this time the run finishes a step and saves a checkpoint.

    Args:
        limit: Time limit of the job, in minutes.
    """
    return min(120, 30 * limit)


@dataclass
class Submission:
    """One run as a picklable callable for submitit, the same in every task."""

    config: dict[str, Any]  # resolved, as plain types; for `resume` see `read_config`
    folder: str  # working directory of the submission, base of relative paths in the config
    modules: list[str] = field(default_factory=list)  # added to sys.path for `import:`
    requeues: int = 0  # of a local job, which does not count them itself
    submitted: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def out(self) -> str:
        """The run folder, independent of the current directory."""
        return str(Path(self.folder, self.config["out"]))

    def __call__(self) -> str:
        """Train as one rank of the job.

        Returns:
            The run folder.

        Raises:
            UserError: If config or data are invalid.
            RunError: If the run failed or was interrupted.
            SystemExit: If the job was requeued, so that submitit records no result. submitit
                restarts a local job after the exit code 144.
        """
        if in_local_job():  # submitit's handler ignores SIGTERM, all that `selftask cancel` sends
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(self.folder)
        os.environ[LOCAL_REQUEUES] = str(self.requeues)
        sys.path[:0] = [path for path in self.modules if path not in sys.path]
        from selftask.data.loading.open_data import check_data, open_data
        from selftask.run.early_errors import report_early_errors
        from selftask.run.run import run

        with report_early_errors(self.out):
            config = self.read_config()
            sources = open_data(config.data)
            check_data(config, sources.train)
            code = run(config, sources)
        state = json.loads(Path(self.out, "status.json").read_text(encoding="utf-8"))
        if code == 0 and state.get("state") == "requeued":
            if not in_local_job():
                sys.exit(0)
            self._count_requeue()
            sys.exit(LOCAL_REQUEUE_RETURN_CODE)
        if code != 0:
            reason = state.get("error") or f"interrupted by {state.get('by')}"
            raise RunError(f"{ENDED}{code}: {reason}; see {self.out}/log.txt")
        return self.out

    def _count_requeue(self) -> None:
        """On rank 0, write the submission of the next attempt, with the requeue counted."""
        job = JobEnvironment()
        if job.global_rank == 0:
            again = replace(self, requeues=self.requeues + 1)
            DelayedSubmission(again).dump(job.paths.submitted_pickle)

    def checkpoint(self) -> DelayedSubmission:
        """Return this submission, to run again after a requeue; its state is in the run folder."""
        return DelayedSubmission(self)

    __submitit_checkpoint__ = checkpoint  # submitit 1.5.4 uses both names

    def read_config(self) -> Config:
        """Return ``config`` as a ``Config`` object.

        ``resume=never`` and ``resume=FILE`` are for the first attempt: once the job has saved a
        checkpoint, it is resumed.
        """
        from selftask.config.load import load_config

        saved = Path(self.out, "checkpoints").glob("step_*")
        again = any(path.stat().st_mtime > self.submitted for path in saved)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "config.yaml")
            path.write_text(yaml.safe_dump(self.config, sort_keys=False), encoding="utf-8")
            return load_config(str(path), ["resume=auto"] if again else [])


class Executor(SlurmExecutor):
    """submitit's SLURM executor, extended to return its script without SLURM.

    ``teardown`` contains shell lines to run after srun; submitit supports them only since 1.5.4.
    """

    teardown: Sequence[str] = ()

    @classmethod
    def affinity(cls) -> int:
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text: str = super()._make_submission_file_text(command, uid)
        return "\n".join([text, "# teardown", *self.teardown])

    def script(self, runs: int = 1) -> str:
        """Return the sbatch script for ``runs`` runs."""
        if runs > 1:
            self.parameters["map_count"] = runs
        text = self._make_submission_file_text(self._submitit_command_str, "")
        self.parameters.pop("map_count", None)
        return text


def executor(launch: LaunchConfig, folder: Path, name: str, **derived: Any) -> Executor:
    """Create the executor of a submission.

    Args:
        launch: Nodes, processes and sbatch options.
        folder: Folder of logs, scripts and pickles.
        name: Job name.
        **derived: Default sbatch options; those in ``launch.slurm`` take precedence.

    Raises:
        UserError: If a value has a control character, or the path of ``folder`` a ``%``.
    """
    chosen = derived | options_of(launch.slurm)
    _check_lines({"out": str(folder.absolute()), "the name of the job": name, **chosen})
    if "%" in str(folder.absolute()):
        raise UserError(
            f"out={folder.parent}: sbatch replaces % in the names of its logs; the folder keeps "
            "its name when the job starts again, so give it one without %"
        )
    limit = minutes(chosen.pop("time", None)) or DEFAULT_MINUTES
    options = {key: value for key, value in chosen.items() if key not in SUBMITIT}
    options = {"job_name": name, "requeue": True, **options}
    if options.get("no_requeue"):
        del options["requeue"]
    submitits = {key: value for key, value in chosen.items() if key in SUBMITIT}
    submitits.setdefault("signal_delay_s", signal_delay_s(limit))
    # submitit's default is $SUBMITIT_PREEMPT_SIGNAL
    options = {"signal": f"{WARNING}@{submitits['signal_delay_s']}", **options}
    extra = {key: list(submitits.pop(key, [])) for key in ("setup", "teardown", "srun_args")}
    result = Executor(folder.absolute(), max_num_timeout=launch.max_requeues)
    result.update_parameters(
        time=limit,
        nodes=launch.nodes,
        ntasks_per_node=launch.processes,
        setup=[f"unset {_OF_LAUNCHERS}", *extra["setup"], *_before()],
        srun_args=["--kill-on-bad-exit=1", *extra["srun_args"]],
        additional_parameters={
            key: value for key, value in options.items() if value not in (None, False)
        },
        **submitits,
    )
    result.teardown = [*_afterwards(folder.absolute()), *extra["teardown"], "exit $code"]
    return result


def _check_lines(values: Mapping[str, Any]) -> None:
    """Raise UserError for control characters; line breaks would add lines to the script."""
    for key, value in values.items():
        if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value):
            raise UserError(f"{key}: {value!r}: the sbatch script needs it in one line")


def _before() -> list[str]:
    """Return shell lines before srun: environment, a mark in the log, and a trap for SIGTERM."""
    lines = [
        f"export PYTHONPATH={shlex.quote(root)}${{PYTHONPATH:+:$PYTHONPATH}}"
        for root in python_path()
    ]
    # With launch.slurm.export=NONE, srun would pass none of these on.
    lines.append("unset SLURM_EXPORT_ENV")
    lines.append("export PYTHONSAFEPATH=1  # modules of the current folder shadow no others")
    # By default torch prints a C++ stack for each connection that a dying rank breaks.
    lines.append("export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}")
    # srun does not inherit this from sbatch since SLURM 22.05.
    cpus = "${SLURM_CPUS_PER_TASK:-}"  # not set with --cpus-per-gpu
    lines.append(f'[ -z "{cpus}" ] || export SRUN_CPUS_PER_TASK={cpus}')
    lines.append(f'echo "{MARK}$((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $SLURM_JOB_ID" >&2')
    lines.append("set +e  # the lines after srun are for its failures")
    lines.append("trap : TERM  # ranks get it, too, and save; this shell waits for them")
    return lines


def python_path() -> list[str]:
    """Return the folders that PYTHONPATH needs to import selftask; none if it is installed."""
    root = str(Path(selftask.__file__).resolve().parents[1])
    return [] if root in site.getsitepackages() else [root]


def _afterwards(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "selftask.slurm.batch_epilogue"]
    return [
        "code=$?",
        f"[ $code = 0 ] || {{ {shlex.join(command)} $code {shlex.quote(str(folder))}; code=$?; }}",
        "unset PYTHONSAFEPATH  # the teardown is the user's",
    ]


def submit(submissions: Sequence[Callable[[], Any]], executor: Executor) -> list[SlurmJob[Any]]:
    """Submit runs to SLURM and return their jobs; several runs become one job array.

    Raises:
        UserError: If SLURM's programs are missing, or sbatch refuses the job.
    """
    # submitit looks for srun before it submits an array.
    programs = ("sbatch", "srun") if len(submissions) > 1 else ("sbatch",)
    if missing := [name for name in programs if shutil.which(name) is None]:
        raise UserError(
            f"there is no {' and no '.join(missing)} on this machine: submit from the cluster's "
            "login node, or train here with `selftask train`"
        )
    executor.folder.mkdir(parents=True, exist_ok=True)
    try:
        with _outside_of_jobs():
            return executor.submit_array(list(submissions))  # type: ignore[return-value]
    except Exception as error:
        if type(error).__name__ not in ("FailedJobError", "FailedSubmissionError"):
            raise
        raise UserError(f"sbatch refused the job: {str(error).strip()}") from error


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Context without the SLURM variables of the current job, which sbatch would inherit.

    ``SBATCH_ACCOUNT`` and similar variables are kept, since users set them. SLURM itself sets only
    ``SBATCH_MEM_BIND`` and those that begin with it.
    """
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    of_user = re.compile("SLURM_CONF$|SBATCH_(?!MEM_BIND)")
    kept = {key: value for key, value in os.environ.items() if of_user.match(key)}
    with clean_env():
        os.environ.update(kept)
        yield
