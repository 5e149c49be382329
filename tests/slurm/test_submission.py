"""What SLURM runs for ``selftask submit``, without a cluster: pickled, requeued, watched, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import cloudpickle
import pytest
from submitit.core.job_environment import _checkpoint
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths
from submitit.slurm.slurm import SlurmJob

import tiny
from run_folders import read_events
from selftask.config.load import load_config
from selftask.config.schema import LaunchConfig
from selftask.errors import RunError
from selftask.logs import write_json
from selftask.run import slurm_job
from selftask.slurm.batch_epilogue import after
from selftask.slurm.job import Submission
from selftask.slurm.plan import plan

Fake = Callable[[str, str], None]  # of conftest


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny.overrides("simclr", tmp_path_factory.mktemp("data"), "run", "launch.max_restarts=2")


@pytest.fixture(scope="module")
def some_submission(given: list[str]) -> Submission:
    return plan("simclr/digits", given).submissions[0]


@pytest.fixture
def submission(some_submission: Submission, tmp_path: Path) -> Submission:
    config = {**some_submission.config, "out": str(tmp_path / "run")}
    return replace(some_submission, config=config)


def test_submission_is_small_and_loads_without_torch(
    tmp_path: Path, submission: Submission
) -> None:
    pickled = cloudpickle.dumps(DelayedSubmission(submission))
    assert len(pickled) < 20_000
    (tmp_path / "pickle").write_bytes(pickled)
    code = (
        "import pickle, sys; loaded = pickle.load(open('pickle', 'rb')).function\n"
        "assert 'torch' not in sys.modules; print(loaded.out)"
    )
    done = tiny.run([sys.executable, "-c", code], tmp_path)
    assert done.stdout.strip() == submission.out, done.stderr


def test_submission_holds_the_whole_config(
    tmp_path: Path, given: list[str], submission: Submission
) -> None:
    whole = load_config("simclr/digits", [*given, f"out={tmp_path / 'run'}"])
    assert submission.read_config() == whole


def test_only_the_first_attempt_begins_anew(submission: Submission) -> None:
    """After a requeue, resume=never must not set the job's own checkpoints aside."""
    resume = {**submission.config["resume"], "checkpoint": "never"}
    job = replace(submission, config={**submission.config, "resume": resume})
    saved = Path(job.out, "checkpoints", "step_000000010.pt")
    saved.parent.mkdir(parents=True)
    saved.touch()
    for age_s, expected in ((60, "never"), (-60, "auto")):
        os.utime(saved, (job.submitted - age_s, job.submitted - age_s))
        assert job.read_config().resume.checkpoint == expected


def test_submission_returns_itself_by_both_names(tmp_path: Path, submission: Submission) -> None:
    submission.modules = [*submission.modules, "/added/later"]
    for name in ("checkpoint", "__submitit_checkpoint__"):
        again = getattr(submission, name)()
        assert isinstance(again, DelayedSubmission)
        assert again.function == submission
        assert again.function.modules[-1] == "/added/later", "as it is now"
    assert hasattr(submission, "checkpoint")  # what submitit 1.5.4 asks before it requeues
    path = tmp_path / "1_submitted.pkl"
    assert _checkpoint(DelayedSubmission(submission), path, 2) == ""
    assert DelayedSubmission.load(path).function == submission
    assert submission.config["resume"]["checkpoint"] == "auto"


def test_submission_ends_as_its_run_does(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(submission.folder)
    ends = {"code": 0, "state": "finished"}

    def run(config: Any, sources: Any) -> int:
        assert config.out == submission.config["out"]
        Path(config.out).mkdir(exist_ok=True)
        write_json(Path(config.out) / "status.json", {"error": "too warm", **ends})
        return int(ends["code"])

    monkeypatch.setattr("selftask.run.run.run", run)
    assert submission() == submission.out
    ends.update(code=1, state="failed")
    with pytest.raises(RunError, match=r"code 1: too warm; see /.*/run/log\.txt$"):
        submission()
    ends.update(code=0, state="requeued")
    with pytest.raises(SystemExit) as left:
        submission()
    assert left.value.code == 0


# -- leaving a job -----------------------------------------------------------------------------


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside job 12, restarted once so far."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def controller(state: str, reason: str = "None", restarts: int = 1, requeue: str = "") -> str:
    facts = f"JobId=12 JobName=x JobState={state} Reason={reason} Restarts={restarts} BatchFlag=1"
    return f'[ "$1" = show ] && echo "{facts}" && exit 0\n{requeue or "exit 0"}'


@pytest.mark.parametrize(
    ("answer", "state", "code", "outlook"),
    [
        (controller("RUNNING"), "requeued", 0, "job 12 is back in the queue; 2 of 3 requeues left"),
        (controller("COMPLETING", "TimeLimit"), "requeued", 0, "2 of 3 requeues left"),
        (controller("COMPLETING", restarts=2), "requeued", 0, "SLURM has put job 12 back"),
        (controller("COMPLETING"), "interrupted", 140, "job 12 was cancelled"),
        (
            controller("RUNNING", requeue="echo 'Access denied' >&2; exit 1"),
            "interrupted",
            140,
            "could not be requeued (Access denied)",
        ),
        ("exit 1", "interrupted", 140, "the same command resumes it"),
    ],
)
def test_departure(
    tmp_path: Path, fake: Fake, in_job: None, answer: str, state: str, code: int, outlook: str
) -> None:
    """In the second attempt, after a preemption: none of the three requeues is used up."""
    fake("scontrol", answer)
    leaving = slurm_job.depart("SIGUSR2", LaunchConfig(max_requeues=3), tmp_path, first=True)
    assert (leaving.state, leaving.code) == (state, code)
    assert outlook in leaving.outlook
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # SLURM sends it with a requeue


def test_departure_without_requeues_left(tmp_path: Path, fake: Fake, in_job: None) -> None:
    launch = LaunchConfig(max_requeues=1)
    fake("scontrol", controller("RUNNING", requeue="exit 1"))
    assert slurm_job.depart("SIGTERM", launch, tmp_path, first=True).state == "interrupted"
    fake("scontrol", controller("RUNNING"))
    assert "0 of 1 requeues" in slurm_job.depart("SIGTERM", launch, tmp_path, first=True).outlook
    fake("scontrol", controller("COMPLETING", restarts=2))  # preempted: SLURM has requeued it
    assert slurm_job.depart("SIGTERM", launch, tmp_path, first=True).state == "requeued"
    fake("scontrol", controller("RUNNING"))
    leaving = slurm_job.depart("SIGTERM", launch, tmp_path, first=True)
    assert (leaving.state, leaving.code) == ("interrupted", 143)
    assert "max_requeues=1 is used up" in leaving.outlook


def test_departure_of_a_local_job(
    tmp_path: Path, fake: Fake, in_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started from a shell in a SLURM job, which `cancel` must not requeue."""
    fake("scontrol", controller("RUNNING"))
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "12")
    leaving = slurm_job.depart("SIGTERM", LaunchConfig(), tmp_path, first=True)
    assert (leaving.state, leaving.code) == ("interrupted", 143)
    for most, done, state, outlook in (
        (2, 0, "requeued", "1 of 2 requeues left"),
        (2, 2, "interrupted", "launch.max_requeues=2 is used up"),
        (100, 4, "requeued", "0 of 5 requeues left"),
        (100, 5, "interrupted", "the limit of 5 requeues is used up"),
    ):
        monkeypatch.setenv(slurm_job.LOCAL_REQUEUES, str(done))
        leaving = slurm_job.depart(
            "SIGUSR2", LaunchConfig(max_requeues=most), tmp_path, first=False
        )
        assert (leaving.state, leaving.code) == (state, 140 if state == "interrupted" else 0)
        assert outlook in leaving.outlook


def test_departure_of_others_and_of_runs_outside(
    tmp_path: Path, fake: Fake, in_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("scontrol", "echo asked >&2; exit 1")
    launch = LaunchConfig()
    assert slurm_job.depart("SIGUSR2", launch, tmp_path, first=False).code == 0
    assert slurm_job.depart("SIGINT", launch, tmp_path, first=True).code == 130
    assert slurm_job.depart("train.stop_at=3", launch, tmp_path, first=True).code == 75
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm_job.depart("SIGTERM", launch, tmp_path, first=True).code == 143


@pytest.fixture
def folder(submission: Submission, in_job: None) -> Path:
    """The folder of job 12, whose rank 0 was killed while it ran."""
    out = Path(submission.out)
    folder = out / "slurm"
    folder.mkdir(parents=True)
    DelayedSubmission(submission).dump(JobPaths(folder, "12").submitted_pickle)
    log = (
        "selftask: attempt 1 of job 12\nsrun: error: n9: task 9: Killed\n"
        "selftask: attempt 2 of job 12\nsrun: error: n1: task 0: Killed\n"
    )
    JobPaths(folder, "12").stderr.write_text(log)
    (out / "log.txt").write_text("step 3\n")
    write_json(out / "status.json", {"state": "running", "step": 3, "attempt": ATTEMPT})
    return folder


ATTEMPT = "slurm:12:1"


def job(state: str = "RUNNING", restarts: int = 1) -> slurm_job.Job:
    return slurm_job.Job("12", state, "None", restarts, attempt=1, batch=True)


def state_and_log(folder: Path) -> tuple[str, str]:
    """State and last line of the run."""
    return tiny.status(folder.parent)["state"], (folder.parent / "log.txt").read_text()


def test_failed_ranks_start_again_as_often_as_allowed(
    folder: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("scontrol", "echo $* >> requeued")
    monkeypatch.chdir(folder)
    crash = "attempt 2 of job 12\nsrun: error: n1: task 0: Segmentation fault\n"
    JobPaths(folder, "12").stderr.write_text(crash)
    stale = JobPaths(folder, "12", 1).result_pickle
    for left in (1, 0):
        write_json(folder.parent / "status.json", {"state": "running", "attempt": ATTEMPT})
        stale.write_bytes(cloudpickle.dumps(("error", "rank 1 has lost rank 0")))
        assert after(137, folder, job()) == 0
        state, log = state_and_log(folder)
        assert state == "requeued"
        cause = "rank 0 on n1 crashed (Segmentation fault)"
        assert f"{cause}; job 12 is back in the queue; {left} of 2 restarts left" in log
        assert not stale.exists()
    assert (folder / "requeued").read_text() == "requeue 12\n" * 2
    write_json(folder.parent / "status.json", {"state": "running", "attempt": ATTEMPT})
    assert after(137, folder, job()) == 137
    state, log = state_and_log(folder)
    assert state == "failed"
    assert log.endswith("RUN FAILED: rank 0 on n1 crashed (Segmentation fault)\n")
    with pytest.raises(FailedJobError, match=r"rank 0 on n1 crashed") as caught:
        SlurmJob(folder, "12", tasks=[0]).results()
    assert str(JobPaths(folder, "12", 0).stderr) in str(caught.value)


@pytest.mark.parametrize(
    ("status", "stderr", "lost"),
    [
        ({"state": "running"}, "srun: error: n1: task 0: Killed\n", True),
        ({"state": "running"}, "/home/groom: slow\nsrun: error: Node failure on n2\n", True),
        ({"state": "failed", "error": "rank 1 is dead", "lost": True}, "", True),
        ({"state": "failed", "error": "rank 1 raised", "lost": False}, "", False),
        (
            {"state": "running"},
            "slurmstepd: error: Detected 1 oom_kill event\nsrun: error: n1: task 0: Killed\n",
            False,
        ),
        (
            {"state": "running"},
            "srun: error: n2: task 1: Exited with exit code 1\nsrun: error: n1: task 0: Killed\n",
            False,
        ),
    ],
)
def test_a_lost_rank_costs_a_requeue_and_a_failure_a_restart(
    submission: Submission, folder: Path, fake: Fake, status: Any, stderr: str, lost: bool
) -> None:
    """With no restarts allowed: whoever was killed from outside comes back all the same."""
    submission.config["launch"].update(max_restarts=0, max_requeues=3)
    DelayedSubmission(submission).dump(JobPaths(folder, "12").submitted_pickle)
    fake("scontrol", "exit 0")
    JobPaths(folder, "12").stderr.write_text(f"selftask: attempt 2 of job 12\n{stderr}")
    write_json(folder.parent / "status.json", {**status, "attempt": ATTEMPT})
    assert after(137, folder, job()) == (0 if lost else 137)
    state, log = state_and_log(folder)
    assert state == ("requeued" if lost else "failed")
    assert ("2 of 3 requeues left" in log) is lost


def test_an_error_before_the_ranks_met_is_the_cause(folder: Path, fake: Fake) -> None:
    """srun tells of rank 0, which it has ended because rank 1 failed."""
    errors = folder.parent / "errors"
    errors.mkdir()
    early = {"attempt": ATTEMPT, "message": "data: no such folder: /scratch (on n2)"}
    write_json(errors / "early_rank1.json", early)
    write_json(errors / "early_rank2.json", {"attempt": "slurm:12:0", "message": "of yesterday"})
    assert after(143, folder, job()) == 143
    assert state_and_log(folder)[1].endswith(
        "RUN FAILED: rank 1: data: no such folder: /scratch (on n2)\n"
    )


def test_what_the_user_has_to_mend_does_not_start_again(folder: Path, fake: Fake) -> None:
    fake("scontrol", "exit 3")
    path = JobPaths(folder, "12", 1).result_pickle
    path.write_bytes(cloudpickle.dumps(("error", "RunError: the run ended with code 2: no crop")))
    assert after(143, folder, job()) == 143
    assert state_and_log(folder)[0] == "failed"


@pytest.mark.parametrize(
    ("now", "code", "state", "line"),
    [
        (job(restarts=2), 0, "requeued", "SLURM has put job 12 back into the queue"),
        (job("COMPLETING"), 143, "interrupted", "job 12 was cancelled"),
        (None, 143, "failed", "RUN FAILED: rank 0 on n1 was killed"),
    ],
)
def test_nothing_is_requeued_twice(
    folder: Path, now: slurm_job.Job | None, code: int, state: str, line: str
) -> None:
    assert after(143, folder, now) == code
    assert state_and_log(folder)[0] == state
    assert line in state_and_log(folder)[1]
    (event,) = read_events(folder.parent)
    kinds = {"requeued": "requeue", "interrupted": "stop", "failed": "failure"}
    assert (event["event"], event["step"]) == (kinds[state], 3)
    assert state_and_log(folder)[1].endswith(f" {event['text']}\n")


@pytest.mark.parametrize("state", ["finished", "interrupted", "requeued"])
def test_what_the_run_has_told_itself_stays(folder: Path, state: str) -> None:
    write_json(folder.parent / "status.json", {"state": state, "attempt": ATTEMPT})
    assert after(1, folder, job()) == 1
    assert state_and_log(folder) == (state, "step 3\n")


def test_a_run_of_somebody_else_in_the_folder_is_left_alone(folder: Path) -> None:
    lock = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    wait = "print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", f"{lock}; {wait}", folder.parent / ".lock"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert after(2, folder, None) == 2
        other.communicate()
    assert state_and_log(folder) == ("running", "step 3\n")
    assert after(2, folder, None) == 2
    assert state_and_log(folder)[0] == "failed", "and nobody's any more"


@pytest.mark.parametrize("state", ["finished", "interrupted", "requeued"])
def test_what_an_attempt_before_has_told_is_past(folder: Path, state: str) -> None:
    """This attempt died so early that it has not even said that it runs."""
    write_json(folder.parent / "status.json", {"state": state, "attempt": "slurm:12:0"})
    assert after(137, folder, None) == 137
    assert state_and_log(folder)[0] == "failed"
