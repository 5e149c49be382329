"""What a SLURM job runs, and the sbatch script around it. Free of torch: it is unpickled first."""

from __future__ import annotations

import json
import os
import shlex
import site
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from submitit.core.utils import DelayedSubmission
from submitit.helpers import clean_env
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

import selftask
from selftask.config.checks.sbatch import DEFAULT_MINUTES, SUBMITIT, minutes, option
from selftask.config.schema import Config, LaunchConfig
from selftask.errors import RunError, UserError
from selftask.slurm.batch_epilogue import ENDED, MARK


def signal_delay_s(limit: int) -> int:
    """The default for jobs of so many minutes: time to finish a step and to save."""
    return min(120, 30 * limit)


@dataclass
class Submission:
    """One run as a callable for submitit: small, picklable, the same in every task and attempt."""

    config: dict[str, Any]  # resolved, plain; `resume` in it lets each attempt go on
    folder: str  # where it was submitted: relative paths of the config begin here
    modules: list[str] = field(default_factory=list)  # folders in which `import:` finds its own

    @property
    def out(self) -> str:
        """The run folder, wherever this is asked."""
        return str(Path(self.folder, self.config["out"]))

    def __call__(self) -> str:
        """Train as one rank of the job; the run folder. Raises RunError for a run that failed.

        A run on its way back to the queue leaves by SystemExit: submitit must not note a result.
        """
        os.chdir(self.folder)
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
            sys.exit(0)
        if code != 0:
            reason = state.get("error") or f"interrupted by {state.get('by')}"
            raise RunError(f"{ENDED}{code}: {reason}; see {self.out}/log.txt")
        return self.out

    def checkpoint(self) -> DelayedSubmission:
        """Itself again: what there is to remember lies in the run folder."""
        return DelayedSubmission(self)

    __submitit_checkpoint__ = checkpoint  # the new name; submitit 1.5.4 looks for both

    def read_config(self) -> Config:
        """The config as an object."""
        from selftask.config.load import load_config

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "config.yaml")
            path.write_text(yaml.safe_dump(self.config, sort_keys=False), encoding="utf-8")
            return load_config(str(path), [])


class Executor(SlurmExecutor):
    """submitit's, which can also write its script where there is no SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def script(self, runs: int = 1) -> str:
        """The sbatch script for so many runs."""
        if runs > 1:
            self.parameters["map_count"] = runs
        text = self._make_submission_file_text(self._submitit_command_str, "")
        self.parameters.pop("map_count", None)
        return text


def executor(launch: LaunchConfig, folder: Path, name: str, **derived: Any) -> Executor:
    """submitit's executor for these processes; ``derived`` options give way to the user's.

    Logs, scripts and pickles go to ``folder``.
    """
    given = {**derived, **{option(key): value for key, value in launch.slurm.items()}}
    limit = minutes(given.pop("time", None)) or DEFAULT_MINUTES
    options = {key: value for key, value in given.items() if key not in SUBMITIT}
    options = {"job_name": name, "requeue": True, **options}
    if options.get("no_requeue"):
        del options["requeue"]
    submitits = {key: value for key, value in given.items() if key in SUBMITIT}
    submitits.setdefault("signal_delay_s", signal_delay_s(limit))
    extra = {key: list(submitits.pop(key, [])) for key in ("setup", "teardown", "srun_args")}
    made = Executor(folder.absolute(), max_num_timeout=launch.max_requeues)
    made.update_parameters(
        time=limit,
        nodes=launch.nodes,
        ntasks_per_node=launch.processes,
        setup=[*extra["setup"], *_before()],
        teardown=[*_afterwards(folder.absolute()), *extra["teardown"], "exit $code"],
        srun_args=["--kill-on-bad-exit=1", *extra["srun_args"]],
        additional_parameters={
            key: value for key, value in options.items() if value not in (None, False)
        },
        **submitits,
    )
    return made


def _before() -> list[str]:
    """Shell lines before srun: the same selftask, a mark in the log, and a shell that outlives."""
    lines = []
    root = str(Path(selftask.__file__).resolve().parents[1])
    if root not in site.getsitepackages():
        lines.append(f"export PYTHONPATH={shlex.quote(root)}${{PYTHONPATH:+:$PYTHONPATH}}")
    lines.append("export PYTHONSAFEPATH=1  # modules of the current folder shadow no others")
    # Else torch shows the C++ stack of each connection that a dying rank breaks.
    lines.append("export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}")
    # srun no longer takes this over from sbatch (since 22.05)
    lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
    lines.append(f'echo "{MARK}$((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $SLURM_JOB_ID" >&2')
    lines.append("trap : TERM  # ranks get it, too, and save; this shell waits for them")
    return lines


def _afterwards(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "selftask.slurm.batch_epilogue"]
    return [
        "code=$?",
        f"[ $code = 0 ] || {{ {shlex.join(command)} $code {shlex.quote(str(folder))}; code=$?; }}",
        "unset PYTHONSAFEPATH  # the teardown is the user's",
    ]


def submit(submissions: list[Submission], made: Executor) -> list[SlurmJob[Any]]:
    """Hand the runs to SLURM, several as one job array. Raises UserError with sbatch's words."""
    made.folder.mkdir(parents=True, exist_ok=True)
    try:
        with _outside_of_jobs():
            return made.submit_array(submissions)  # type: ignore[return-value]
    except FileNotFoundError as error:
        raise UserError(
            "there is no sbatch on this machine: submit from the cluster's login node, "
            "or train here with `selftask train`"
        ) from error
    except Exception as error:
        if type(error).__name__ not in ("FailedJobError", "FailedSubmissionError"):
            raise
        raise UserError(f"sbatch refused the job: {str(error).strip()}") from error


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """A job submitted from inside a job must not inherit that one's variables."""
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    place = {key: os.environ[key] for key in ("SLURM_CONF",) if key in os.environ}
    with clean_env():
        os.environ.update(place)
        yield
