"""``selftask submit`` without a cluster: what is checked, planned, written and pickled."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission

import tiny
from selftask.cli.main import main
from selftask.config.checks.sbatch import minutes, show_minutes
from selftask.config.compose.sweep import expand_sweep
from selftask.errors import ConfigError, UserError
from selftask.logs import write_json
from selftask.slurm import queue
from selftask.slurm.plan import plan

CLUSTER = ("launch.nodes=2", "launch.processes=4", "launch.slurm.time=2:30:00")
Fake = Callable[[str, str], None]  # of conftest


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
        f"-m selftask.slurm.batch_epilogue $code {tmp_path / 'run' / 'slurm'}",
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
    assert queue.noted(tmp_path / "run") == {tmp_path / "run": "77"}
    folder = tmp_path / "run" / "slurm"
    expected = ["77_submission.sh", "77_submitted.pkl", "jobs.json"]
    assert sorted(path.name for path in folder.glob("[!.]*")) == expected
    assert f"#SBATCH --output={folder}/%j_0_log.out\n" in planned.script()
    assert f"--output {folder}/%j_%t_log.out" in planned.script()
    loaded = DelayedSubmission.load(folder / "77_submitted.pkl")
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


def test_modules_of_the_current_folder_shadow_none_in_a_job(tmp_path: Path, fake: Fake) -> None:
    """Python 3.11 and newer heed PYTHONSAFEPATH; lines of the user's run without it."""
    lines = "launch.slurm.teardown=['echo teardown $PYTHONSAFEPATH']"
    script = tmp_path / "script.sh"
    script.write_text(plan("simclr/digits", words(tmp_path, "run", *CLUSTER, lines)).script())
    fake("srun", "echo srun $PYTHONSAFEPATH")
    done = tiny.run(["bash", str(script)], tmp_path)
    assert done.stdout.splitlines() == ["srun 1", "teardown"]


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


def test_one_log_file_a_task(tmp_path: Path) -> None:
    """Without ``--error`` sbatch and srun write both streams to the file of ``--output``."""
    lines = {}
    for joined in ("true", "false"):
        given = f"launch.slurm.stderr_to_stdout={joined}"
        lines[joined] = plan("simclr/digits", words(tmp_path, "run", given)).script().splitlines()
        assert any(line.startswith("#SBATCH --output=") for line in lines[joined])
        assert any("srun" in line and "--output" in line for line in lines[joined])
    assert not any("--error" in line for line in lines["true"])
    assert any("#SBATCH --error=" in line for line in lines["false"])


def test_counts_and_memory_of_sbatch(tmp_path: Path) -> None:
    options = ("mem_per_cpu=4000", "gpus_per_node='a100:2,v100:1'", "tmp=20G", "cpus_per_task=3")
    given = [*CLUSTER, *(f"launch.slurm.{option}" for option in options)]
    given.append("launch.slurm.job_name=mine")
    script = plan("simclr/digits", words(tmp_path, "run", *given)).script()
    for line in (
        *("--mem-per-cpu=4000", "--gpus-per-node=a100:2,v100:1", "--tmp=20G", "--cpus-per-task=3"),
        *("--nodes=2", "--ntasks-per-node=4", "--time=150", "--job-name=mine"),
    ):
        assert f"#SBATCH {line}\n" in script


SLURM = {
    "partition": "gpu,long",
    "qos": "high",
    "account": "vision",
    "constraint": "'a100|h100'",
    "gres": "'gpu:a100:4'",
    "exclude": "'n[1-3]'",
    "nodelist": "n7",
    "dependency": "'afterok:12'",
    "comment": "'to the end'",
    "mail_type": "END",
    "mail_user": "me@example.org",
    "wckey": "ssl",
    "cpus_per_gpu": "6",
    "gpus_per_task": "1",
    "mem_per_gpu": "40G",
    "reservation": "night",  # one that submitit does not know
}  # options of sbatch, as they stand on the command line


def test_options_of_sbatch_and_lines_around_srun(tmp_path: Path) -> None:
    given = [f"launch.slurm.{name}={value}" for name, value in SLURM.items()]
    given += [
        "launch.slurm.exclusive=true",
        "launch.slurm.setup=['module load cuda', 'ulimit -c 0']",
        "launch.slurm.teardown=['rm -rf /scratch/me']",
        "launch.slurm.srun_args=['--mpi=none', '--cpu-bind=cores']",
        "launch.slurm.array_parallelism=2",
        "launch.slurm.signal_delay_s=45",
        "train.seed=1,2,3",
    ]
    lines = plan("simclr/digits", words(tmp_path, "run", *given)).script().splitlines()
    flags = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")}
    for name, value in SLURM.items():
        plain = value.strip("'")
        flag = name.replace("_", "-")
        assert {f"{flag}={plain}", f"{flag}='{plain}'"} & flags, name
    assert {"exclusive", "array=0-2%2", "signal=USR2@45"} <= flags
    (srun,) = (number for number, line in enumerate(lines) if line.startswith("srun "))
    assert "--mpi=none --cpu-bind=cores" in lines[srun]
    assert lines.index("module load cuda") + 1 == lines.index("ulimit -c 0") < srun
    assert srun < lines.index("rm -rf /scratch/me")


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
        (["launch.slurm.cpus_per_task=all"], "cpus_per_task='all': expected a whole number"),
        (["launch.slurm.cpus-per-gpu=0"], "expected a whole number, 1 or more"),
        (["launch.slurm.mem=lots"], "mem='lots': expected megabytes, or as in 64G"),
        (["launch.slurm.gpus_per_node=a100"], "expected a number, or as in a100:4"),
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


def test_out_without_what_sbatch_replaces(tmp_path: Path) -> None:
    """It would write its logs elsewhere than the run."""
    with pytest.raises(UserError, match=r"run_%j: sbatch replaces %"):
        plan("simclr/digits", tiny.overrides("simclr", tmp_path, "run_%j"))


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


def test_from_inside_of_a_job(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch would take the settings of the job around it for those of the new one."""
    around = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "3", "SBATCH_PARTITION": "x", "SRUN_DEBUG": "3"}
    for name, value in {**around, "SLURM_CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    fake("sbatch", f"env > {tmp_path}/seen; echo Submitted batch job 77")
    fake("squeue", "exit 0")
    (made,) = plan("simclr/digits", words(tmp_path, "run")).submit()
    assert made.job_id == "77"
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert not seen & around.keys() and "SLURM_CONF" in seen
    assert {name: os.environ[name] for name in around} == around, "here they are as before"


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
    queue.note(tmp_path / "run", {tmp_path / "run": "12"})
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


def test_the_cluster_for_tests_takes_its_names_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = runpy.run_path(str(tiny.ROOT / "tools/slurm/cluster.py"))
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    monkeypatch.setitem(cluster["forget_names"].__globals__, "HOSTS", hosts)
    cluster["make_names_resolve"](["localhost", "no-such-host.invalid"])
    assert "no-such-host.invalid" in hosts.read_text()
    cluster["forget_names"]()
    assert hosts.read_text() == "127.0.0.1 localhost\n"
