"""``selftask submit`` without a cluster: what is checked, planned, written and pickled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from submitit.core.job_environment import _checkpoint
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths
from submitit.slurm.slurm import SlurmJob

import tiny
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.config.sbatch import minutes, show_minutes
from selftask.config.schema import LaunchConfig
from selftask.config.sweep import expand_sweep
from selftask.errors import ConfigError, RunError, UserError
from selftask.launch import jobs, slurm
from selftask.launch.after import after
from selftask.launch.submission import Submission
from selftask.launch.submit import plan
from selftask.logs import write_json

CLUSTER = ("launch.nodes=2", "launch.processes=4", "launch.slurm.time=2:30:00")
Fake = Callable[[str, str], None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put programs of SLURM's names first on the PATH, made of shell lines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, lines: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)

    return make


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without sbatch, srun and the rest."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


SMALL: list[str] = []  # tiny's overrides without out=; they are dear, and asked for once


@pytest.fixture(scope="module", autouse=True)
def _small(tmp_path_factory: pytest.TempPathFactory) -> None:
    SMALL[:] = tiny.overrides("simclr", tmp_path_factory.mktemp("data"))[:-1]


def words(folder: Path, out: str, *more: str) -> list[str]:
    """The small run in ``folder/out``."""
    return [*SMALL, f"out={folder / out}", *more]


def submit(folder: Path, *more: str) -> int:
    return main(["submit", "simclr/digits", *words(folder, "run", *more)])


# -- the plan and the script -------------------------------------------------------------------


def test_dry_run_shows_plan_and_script(
    tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("launch.slurm.partition=a,b", "launch.slurm.mail-type=END,FAIL")
    more = (
        "launch.slurm.mem=32GB",
        "launch.slurm.exclusive=true",
        "launch.slurm.hint=nomultithread",
    )
    assert submit(tmp_path, *CLUSTER, *options, *more, "--dry-run") == 0
    shown = capsys.readouterr().out
    for fact in (
        "nodes    2 x 4 processes = 8 ranks",
        "batch    16 images = 2 a rank",
        "steps    15 in 3 epochs",
        "time     2 h 30 min a job",
        f"out      {tmp_path / 'run'}",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --time=150",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --partition=a,b",
        "#SBATCH --mail-type=END,FAIL",
        "#SBATCH --mem=32GB",
        "#SBATCH --hint=nomultithread",
        "#SBATCH --exclusive\n",
        "#SBATCH --requeue\n",
        "#SBATCH --job-name=run",
        "--kill-on-bad-exit=1",
        "python -u -m submitit.core._submit",
        f"-m selftask.launch.after $code {tmp_path / 'run' / 'slurm'}",
    ):
        assert fact in shown
    assert not (tmp_path / "run").exists()


def test_script_is_what_submitit_hands_in(tmp_path: Path, fake: Fake) -> None:
    fake("sbatch", f'cp "$1" {tmp_path}/handed_in; echo Submitted batch job 77')
    fake("squeue", "exit 0")
    planned = plan("simclr/digits", words(tmp_path, "run", *CLUSTER))
    made = planned.submit()
    assert [job.job_id for job in made] == ["77"]
    assert (tmp_path / "handed_in").read_text() == planned.script()
    assert jobs.noted(tmp_path / "run") == {tmp_path / "run": "77"}
    loaded = DelayedSubmission.load(tmp_path / "run" / "slurm" / "77_submitted.pkl")
    assert loaded.function == planned.submissions[0]


def test_script_is_valid_shell_and_returns_the_code_of_srun(tmp_path: Path, fake: Fake) -> None:
    script = tmp_path / "script.sh"
    given = words(tmp_path, "run", *CLUSTER, "launch.slurm.setup=['x=5']")
    script.write_text(plan("simclr/digits", given).script())
    for code in (0, 5):
        fake("srun", 'exit "$x"' if code else "exit 0")
        done = tiny.run(["bash", str(script)], tmp_path)
        # A pickle is missing here, so what follows a failure fails, too, and says so.
        assert (done.returncode == 0) == (code == 0), done.stderr
    assert "attempt 1 of job" in done.stderr


def test_defaults_give_way(tmp_path: Path) -> None:
    options = ("launch.slurm.signal-delay-s=30", "launch.slurm.job_name=mine", "data.num_workers=3")
    script = plan("simclr/digits", words(tmp_path, "run", *options)).script()
    assert "--signal=USR2@30" in script
    assert "--job-name=mine" in script
    assert "--cpus-per-task=3" in script
    assert "--time=60" in script
    assert "gpus" not in script
    options = ("launch.slurm.no_requeue=true", "train.device=cuda", "launch.processes=2")
    planned = plan("simclr/digits", words(tmp_path, "run", *options))
    assert "--requeue" not in planned.script()
    assert "--gpus-per-node=2" in planned.script()


def test_loader_workers_are_those_of_the_nodes(tmp_path: Path) -> None:
    given = words(tmp_path, "run", "launch.slurm.cpus_per_task=5")
    given.remove("data.num_workers=0")
    assert plan("simclr/digits", given).submissions[0].config["data"]["num_workers"] == 5


# -- what is refused ---------------------------------------------------------------------------


def test_all_mistakes_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("launch.slurm.partion=x", "launch.slurm.time=5h", "launch.slurm.nodes=3")
    assert submit(tmp_path, *wrong, "launch.slurm.setup=x", "train.batch_size=7", "launch.nodes=2")
    told = capsys.readouterr().err
    assert "sbatch has no option --partion; did you mean 'partition'?" in told
    assert "launch.slurm.time='5h': expected minutes, h:mm:ss or days-hours" in told
    assert "launch.slurm.nodes is set by selftask; use launch.nodes" in told
    assert "launch.slurm.setup='x': expected a list" in told
    assert "train.batch_size=7" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["launch.slurm.mem=1", "+launch.slurm.--mem=2"], "launch.slurm"),
        (["launch.slurm.signal_delay_s=600", "launch.slurm.time=5"], "not before the start"),
        (["launch.slurm.signal_delay_s=0"], "expected a whole number"),
        (["launch.slurm.gres={a: 1}"], "expected one value"),
        (["data=no/such/folder"], "no/such/folder"),
    ],
)
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], message: str
) -> None:
    assert submit(tmp_path, *wrong, "--dry-run") == 2
    assert message in capsys.readouterr().err


def test_a_mistake_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from selftask.cli.main import main\n"
        "assert main(['submit', 'simclr', 'launch.slurm.partion=x', 'train.seed=1,2']) == 2\n"
        "assert not {'torch', 'sklearn'} & set(sys.modules)"
    )
    done = tiny.run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


def test_out_is_a_place_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = words(tmp_path, "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        plan("simclr/digits", [*given, f"out={tmp_path}/file/run"])
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="0 MB are free"):
        plan("simclr/digits", given)


def test_without_a_cluster_says_so(tmp_path: Path, no_slurm: None) -> None:
    planned = plan("simclr/digits", words(tmp_path, "run"))
    with pytest.raises(UserError, match="no sbatch on this machine"):
        planned.submit()


def test_words_of_sbatch_are_passed_on(tmp_path: Path, fake: Fake) -> None:
    fake("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    planned = plan("simclr/digits", words(tmp_path, "run"))
    with pytest.raises(UserError, match="invalid partition specified: x"):
        planned.submit()


def test_partitions_of_the_cluster(tmp_path: Path, fake: Fake) -> None:
    fake("sinfo", "echo 'cpu*|2:00:00|(null)\ngpu|1-00:00:00|gpu:8\nlong|infinite|(null)'")
    for partition, time in (("cpu", "121"), ("cpu,gpu", "2-0")):
        options = (f"launch.slurm.partition={partition}", f"launch.slurm.time={time}")
        with pytest.raises(UserError, match="allows at most"):
            plan("simclr/digits", words(tmp_path, "run", *options))
    with pytest.raises(UserError, match="no partition 'gpus' on this cluster; did you mean 'gpu'"):
        plan("simclr/digits", words(tmp_path, "run", "launch.slurm.partition=gpus"))
    for partition, time in (("long", "60-0"), ("gpu,long", "60-0"), ("gpu", "24:00:00")):
        options = (f"launch.slurm.partition={partition}", f"launch.slurm.time={time}")
        planned = plan("simclr/digits", words(tmp_path, "run", *options, "train.device=auto"))
        assert ("--gpus-per-node=1" in planned.script()) == ("gpu" in partition)


def test_a_run_is_not_submitted_twice(tmp_path: Path, fake: Fake) -> None:
    jobs.note(tmp_path / "run", {tmp_path / "run": "12"})
    fake("squeue", "echo '12|PENDING|Priority'")
    with pytest.raises(UserError, match=r"job 12 \(PENDING \(Priority\)\) makes"):
        plan("simclr/digits", words(tmp_path, "run"))
    fake("squeue", "exit 0")
    fake("scontrol", "echo 'JobId=12 JobState=COMPLETED Reason=None'")
    plan("simclr/digits", words(tmp_path, "run"))


# sbatch's manual: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]
@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (90, 90),
        ("90", 90),
        ("1:30", 2),
        ("36:00:00", 2160),
        ("2-12", 3600),
        ("1-0:30", 1470),
        ("1-0:0:30", 1441),
        ("0", None),
        ("5h", None),
        ("-5", None),
        (True, None),
        (1.5, None),
    ],
)
def test_minutes(time: Any, expected: int | None) -> None:
    assert minutes(time) == expected


def test_minutes_are_shown_so_that_slips_are_seen() -> None:
    assert show_minutes(3661) == "2 d 13 h 1 min"
    assert show_minutes(60) == "1 h"


# -- sweeps ------------------------------------------------------------------------------------


def test_sweep_is_the_product_of_its_lists() -> None:
    points = expand_sweep(["train.seed=1,2", "optimizer.lr=0.1,0.2", "views.a.sizes=[1,2]"])
    assert [point.name for point in points] == [
        "seed_1_lr_0.1",
        "seed_1_lr_0.2",
        "seed_2_lr_0.1",
        "seed_2_lr_0.2",
    ]
    assert points[1].overrides == ["train.seed=1", "optimizer.lr=0.2", "views.a.sizes=[1,2]"]
    assert [point.name for point in expand_sweep(["train.seed=1"])] == [""]


def test_sweep_names_are_folders_and_differ() -> None:
    assert expand_sweep(["a.x=1,2", "b.x=3,4"])[0].name == "a.x_1_b.x_3"
    names = [p.name for p in expand_sweep(["data=/a/b,'/a b'"])]
    assert len(set(names)) == 2
    assert not any(set(name) & set("/ ,'=") for name in names)


@pytest.mark.parametrize("word", ["out=a,b", "launch.nodes=1,2"])
def test_sweep_refuses_what_all_share(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        expand_sweep([word])


def test_sweep_is_one_array(tmp_path: Path) -> None:
    given = words(tmp_path, "sweep", *CLUSTER, "train.seed=1,2,3")
    planned = plan("simclr/digits", given)
    assert "#SBATCH --array=0-2%3" in planned.script()
    assert [Path(s.out) for s in planned.submissions] == [
        tmp_path / "sweep" / f"seed_{seed}" for seed in (1, 2, 3)
    ]
    assert [s.config["train"]["seed"] for s in planned.submissions] == [1, 2, 3]
    assert "3 runs" in planned.describe()
    done = tmp_path / "sweep" / "seed_2"
    done.mkdir(parents=True)
    write_json(done / "status.json", {"state": "finished", "length": [3, None]})
    assert plan("simclr/digits", given).notes[-2:-1] == [
        f"{done} is complete: its job will only say so"
    ]


def test_mistakes_of_all_runs_of_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        plan("simclr/digits", words(tmp_path, "s", "train.batch_size=0,16,-3"))
    assert len(raised.value.problems) == 2


# -- what the job runs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def some_submission(tmp_path_factory: pytest.TempPathFactory) -> Submission:
    given = words(tmp_path_factory.mktemp("some"), "run", "launch.max_restarts=2")
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


def test_submission_holds_the_whole_config(tmp_path: Path, submission: Submission) -> None:
    given = words(tmp_path, "run", "launch.max_restarts=2")
    assert submission.read_config() == load_config("simclr/digits", given)


def test_submission_returns_itself_by_both_names(tmp_path: Path, submission: Submission) -> None:
    for name in ("checkpoint", "__submitit_checkpoint__"):
        again = getattr(submission, name)()
        assert isinstance(again, DelayedSubmission)
        assert again.function == submission
    assert hasattr(submission, "checkpoint")  # what submitit 1.5.4 asks before it requeues
    path = tmp_path / "1_submitted.pkl"
    assert _checkpoint(DelayedSubmission(submission), path, 2) == ""
    assert DelayedSubmission.load(path).function == submission
    assert submission.config["resume"] == "auto"


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

    monkeypatch.setattr("selftask.launch.run.run", run)
    assert submission() == submission.out
    ends.update(code=1, state="failed")
    with pytest.raises(RunError, match="code 1: too warm"):
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
        (controller("RUNNING"), "requeued", 0, "job 12 is back in the queue; 1 of 3 requeues left"),
        (controller("COMPLETING", "TimeLimit"), "requeued", 0, "1 of 3 requeues left"),
        (controller("COMPLETING", restarts=2), "requeued", 0, "SLURM has put job 12 back"),
        (controller("COMPLETING"), "interrupted", 140, "job 12 was cancelled"),
        (
            controller("RUNNING", requeue="echo 'Access denied' >&2; exit 1"),
            "interrupted",
            140,
            "could not be requeued (Access denied)",
        ),
        ("exit 1", "interrupted", 140, "the same command goes on"),
    ],
)
def test_departure(
    fake: Fake, in_job: None, answer: str, state: str, code: int, outlook: str
) -> None:
    fake("scontrol", answer)
    leaving = slurm.depart("SIGUSR2", LaunchConfig(max_requeues=3), first=True)
    assert (leaving.state, leaving.code) == (state, code)
    assert outlook in leaving.outlook
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # SLURM sends it with a requeue


def test_departure_without_requeues_left(fake: Fake, in_job: None) -> None:
    fake("scontrol", controller("RUNNING", requeue="exit 1"))
    leaving = slurm.depart("SIGTERM", LaunchConfig(max_requeues=1), first=True)
    assert (leaving.state, leaving.code) == ("interrupted", 143)
    assert "max_requeues=1 is used up" in leaving.outlook


def test_departure_of_others_and_of_runs_outside(
    fake: Fake, in_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("scontrol", "echo asked >&2; exit 1")
    launch = LaunchConfig()
    assert slurm.depart("SIGUSR2", launch, first=False).code == 0
    assert slurm.depart("SIGINT", launch, first=True).code == 130
    assert slurm.depart("train.stop_at=3", launch, first=True).code == 75
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm.depart("SIGTERM", launch, first=True).code == 143


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
    write_json(out / "status.json", {"state": "running", "step": 3})
    return folder


def job(state: str = "RUNNING", restarts: int = 1) -> slurm.Job:
    return slurm.Job("12", state, "None", restarts, attempt=1, batch=True)


def told(folder: Path) -> tuple[str, str]:
    """State and last line of the run."""
    return tiny.status(folder.parent)["state"], (folder.parent / "log.txt").read_text()


def test_killed_ranks_start_again_as_often_as_allowed(
    folder: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("scontrol", "echo $* >> requeued")
    monkeypatch.chdir(folder)
    stale = JobPaths(folder, "12", 1).result_pickle
    for left, state in ((1, "running"), (0, "failed")):  # failed: so says a rank that is left
        write_json(folder.parent / "status.json", {"state": state})
        stale.write_bytes(cloudpickle.dumps(("error", "rank 1 has lost rank 0")))
        assert after(137, folder, job()) == 0
        state, log = told(folder)
        assert state == "requeued"
        assert f"rank 0 on n1 was killed (SIGKILL); job 12 is back in the queue; {left} of 2" in log
        assert not stale.exists()
    assert (folder / "requeued").read_text() == "requeue 12\n" * 2
    write_json(folder.parent / "status.json", {"state": "running"})
    assert after(137, folder, job()) == 137
    state, log = told(folder)
    assert state == "failed"
    assert log.endswith("RUN FAILED: rank 0 on n1 was killed (SIGKILL)\n")
    with pytest.raises(FailedJobError, match=r"rank 0 on n1 was killed"):
        SlurmJob(folder, "12", tasks=[0]).results()


def test_what_the_user_has_to_mend_does_not_start_again(folder: Path, fake: Fake) -> None:
    fake("scontrol", "exit 3")
    path = JobPaths(folder, "12", 1).result_pickle
    path.write_bytes(cloudpickle.dumps(("error", "RunError: the run ended with code 2: no crop")))
    assert after(143, folder, job()) == 143
    assert told(folder)[0] == "failed"


@pytest.mark.parametrize(
    ("now", "code", "state", "line"),
    [
        (job(restarts=2), 0, "requeued", "SLURM has put job 12 back into the queue"),
        (job("COMPLETING"), 143, "interrupted", "job 12 was cancelled"),
        (None, 143, "failed", "RUN FAILED: rank 0 on n1 was killed"),
    ],
)
def test_nothing_is_requeued_twice(
    folder: Path, now: slurm.Job | None, code: int, state: str, line: str
) -> None:
    assert after(143, folder, now) == code
    assert told(folder)[0] == state
    assert line in told(folder)[1]


@pytest.mark.parametrize("state", ["finished", "interrupted", "requeued"])
def test_what_the_run_has_told_itself_stays(folder: Path, state: str) -> None:
    write_json(folder.parent / "status.json", {"state": state})
    assert after(1, folder, job()) == 1
    assert told(folder) == (state, "step 3\n")


@pytest.mark.parametrize("state", ["finished", "interrupted", "requeued"])
def test_what_an_attempt_before_has_told_is_past(
    folder: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This attempt died so early that it has not even said that it runs."""
    write_json(folder.parent / "status.json", {"state": state, "updated": 999.0})
    monkeypatch.setenv("SELFTASK_ATTEMPT_STARTED", "1000")
    assert after(137, folder, None) == 137
    assert told(folder)[0] == "failed"


# -- jobs and cancel ---------------------------------------------------------------------------


def test_jobs_shows_state_step_and_last_line(
    tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("going", "waiting", "back", "done", "gone", "taken")
    for name in names:
        (tmp_path / "s" / name).mkdir(parents=True)
    runs = {tmp_path / "s" / name: f"7_{number}" for number, name in enumerate(names)}
    jobs.note(tmp_path / "s", runs)
    states = {"going": "running", "back": "requeued", "done": "finished", "gone": "running"}
    for name, state in {**states, "taken": "running"}.items():
        write_json(tmp_path / "s" / name / "status.json", {"state": state})
    (tmp_path / "s/going/log.txt").write_text("first\nstep 8  loss 1.2\n")
    (tmp_path / "s/going/metrics.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    fake("squeue", "echo '7_0|RUNNING|None\n7_1|PENDING|Resources\n7_2|PENDING|BeginTime'")
    fake("scontrol", '[ $4 = 7_5 ] && echo "JobId=9 JobState=CANCELLED" || exit 1')
    fake("sacct", "exit 1")  # as where no accounts are kept
    assert main(["jobs", str(tmp_path / "s")]) == 0
    shown = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[2] for line in shown] == ["8", "-", "-", "-", "-", "-"]
    assert [" ".join(line[3].split()) for line in shown] == [
        "running step 8 loss 1.2",
        "pending (resources)",
        "requeued, pending (begintime)",
        "finished",
        "lost: job unknown to SLURM",
        "cancelled",
    ]
    assert [run.out.name for run in jobs.stand([tmp_path / "s" / "back"])] == ["back"]
    with pytest.raises(UserError, match="no submitted run"):
        jobs.find([tmp_path])


def test_cancel_by_folder_and_by_id(
    tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.note(tmp_path / "s", {tmp_path / "s" / "a": "7_0", tmp_path / "s" / "b": "7_1"})
    fake("scancel", f'echo "$@" >> {tmp_path}/cancelled')
    assert main(["cancel", str(tmp_path / "s"), "31"]) == 0
    assert (tmp_path / "cancelled").read_text() == "7_0 7_1\n31\n"
    assert main(["cancel", "nowhere"]) == 2
    fake("scancel", "echo 'Invalid job id' >&2; exit 1")
    assert main(["cancel", "31"]) == 2
    assert "Invalid job id" in capsys.readouterr().err


def test_the_readable_script_is_short_and_the_same(tmp_path: Path) -> None:
    path = tiny.ROOT / "tools" / "submit.py"
    assert len(path.read_text().splitlines()) < 40
    given = words(tmp_path, "run", *CLUSTER)
    done = subprocess.run(
        [sys.executable, str(path), "simclr/digits", *given, "--dry-run"],
        cwd=tmp_path,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert plan("simclr/digits", given).script() in done.stdout
