"""``selftask submit`` without a cluster: what is checked, planned, written and pickled."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from submit_words import CLUSTER, Fake, submit, words
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmJob
from torch import nn

import tiny
from selftask.config.load import load_config
from selftask.config.values import auto_values
from selftask.slurm import queue
from selftask.slurm.plan import _checkpoint_megabytes, derived_options, plan

pytestmark = pytest.mark.usefixtures("small_words")


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
        "nodes    2 x 4 ranks = 8 ranks",
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
        "#SBATCH --open-mode=append",
        "--kill-on-bad-exit=1",
        "python -u -m submitit.core._submit",
        f"-m selftask.slurm.batch_epilogue $code {tmp_path / 'run' / 'slurm'}",
    ):
        assert fact in shown
    flags = [line for line in shown.splitlines() if line.startswith("#SBATCH")]
    assert flags == sorted(flags)
    (srun,) = (line for line in shown.splitlines() if line.startswith("srun"))
    assert f"--output {tmp_path / 'run' / 'slurm'}/%j_%t_log.out" in srun
    assert not (tmp_path / "run").exists()


def test_script_is_what_submitit_hands_in(tmp_path: Path, fake: Fake) -> None:
    fake("sbatch", f'cp "$1" {tmp_path}/handed_in; echo Submitted batch job 77')
    fake("squeue", "exit 0")
    planned = plan("simclr/digits", words(tmp_path, "run", *CLUSTER))
    made = planned.submit()
    assert [(type(job), job.job_id) for job in made] == [(SlurmJob, "77")]
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
    given = words(tmp_path, "run", *CLUSTER, "launch.slurm.setup=['x=5', 'set -e']")
    script.write_text(plan("simclr/digits", given).script())
    for code in (0, 5):
        fake("srun", 'exit "$x"' if code else "exit 0")
        done = tiny.run(["bash", str(script)], tmp_path)
        # A pickle is missing here, so what follows a failure fails, too, and says so.
        assert (done.returncode == 0) == (code == 0), done.stderr
        assert ("unknown_submitted.pkl" in done.stderr) == (code != 0)
    assert "attempt 1 of job" in done.stderr


def test_modules_of_the_current_folder_shadow_none_in_a_job(tmp_path: Path, fake: Fake) -> None:
    """Python 3.11 and newer heed PYTHONSAFEPATH; lines of the user's run without it."""
    lines = "launch.slurm.teardown=['echo teardown $PYTHONSAFEPATH']"
    script = tmp_path / "script.sh"
    script.write_text(plan("simclr/digits", words(tmp_path, "run", *CLUSTER, lines)).script())
    fake("srun", "echo srun $PYTHONSAFEPATH")
    done = tiny.run(["bash", str(script)], tmp_path)
    assert done.stdout.splitlines() == ["srun 1", "teardown"]


def test_variables_of_other_launchers_do_not_reach_a_job(tmp_path: Path, fake: Fake) -> None:
    """Those of the submission; lines of the user's may set them, and all reach the ranks."""
    lines = "launch.slurm.setup=['export MASTER_PORT=7']"
    script = tmp_path / "script.sh"
    script.write_text(plan("simclr/digits", words(tmp_path, "run", *CLUSTER, lines)).script())
    fake("srun", "echo $RANK $MASTER_ADDR $MASTER_PORT $SLURM_EXPORT_ENV; echo $SRUN_CPUS_PER_TASK")
    for cpus in ("", "3"):
        given = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "SLURM_EXPORT_ENV": "NONE"}
        given["SLURM_CPUS_PER_TASK"] = cpus
        done = tiny.run(["bash", str(script)], tmp_path, **given)
        assert done.stdout.splitlines() == ["7", cpus]


def test_defaults_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobEnvironment, "USR_SIG", "USR1")  # as by SUBMITIT_PREEMPT_SIGNAL
    options = ("launch.slurm.signal-delay-s=30", "launch.slurm.job_name=mine", "data.num_workers=3")
    script = plan("simclr/digits", words(tmp_path, "run", *options)).script()
    assert "--signal=USR2@30" in script
    assert "--job-name=mine" in script
    assert "--cpus-per-task=3" in script
    assert "--time=60" in script
    assert "gpus" not in script
    options = ("launch.slurm.no_requeue=true", "train.device=cuda", "launch.processes=2")
    planned = plan("simclr/digits", words(tmp_path, "run", *options, "launch.slurm.time=3"))
    assert "--signal=USR2@90" in planned.script(), "half of a short time limit"
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
    assert not any(flag.startswith("cpus-per-task") for flag in flags), "beside cpus-per-gpu"
    (srun,) = (number for number, line in enumerate(lines) if line.startswith("srun "))
    assert "--mpi=none --cpu-bind=cores" in lines[srun]
    assert lines.index("module load cuda") + 1 == lines.index("ulimit -c 0") < srun
    assert srun < lines.index("rm -rf /scratch/me")


def test_loader_workers_are_those_of_the_nodes(tmp_path: Path) -> None:
    given = words(tmp_path, "run", "launch.slurm.cpus_per_task=5")
    given.remove("data.num_workers=0")
    assert plan("simclr/digits", given).submissions[0].config["data"]["num_workers"] == 5


@pytest.mark.parametrize(("gres", "gpus"), [("'nvme:1'", 1), ("'nvme:1,gpu:a100:1'", None)])
def test_a_local_disk_is_no_gpu(gres: str, gpus: int | None) -> None:
    config = load_config("simclr/digits", ["train.device=cuda", f"launch.slurm.gres={gres}"])
    assert derived_options(config, [])[0].get("gpus_per_node") == gpus


@pytest.mark.parametrize(("chosen", "expected"), [([], 8), (["data.num_workers=20"], 20)])
def test_a_large_login_node_does_not_ask_for_as_many_cpus(
    chosen: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_values, "cores", lambda: 64)
    derived, workers, _ = derived_options(load_config("simclr/digits", chosen), [])
    assert derived["cpus_per_task"] == workers == expected


class OfNumbers(nn.Module):
    """A backbone that the meta device cannot build: its tensors have no numbers."""

    embed_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(torch.ones(8).numpy()))


def test_the_size_of_a_checkpoint_if_the_meta_device_builds_no_backbone() -> None:
    config = load_config("simclr/digits", [f"backbone={__name__}:OfNumbers"])
    assert _checkpoint_megabytes(config) == 8 * 4 * 4 / 1e6


OWN_METHOD = """
import torch
from selftask.methods.simclr import SimCLR
from selftask.registry import register_method

@register_method("of_values")
class OfValues(SimCLR):
    def build_head(self, embed_dim):
        assert torch.ones(1).item() == 1
        return super().build_head(embed_dim)
"""


def test_a_method_that_needs_values_is_first_built_in_the_job(
    tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_values.py").write_text(OWN_METHOD)
    monkeypatch.chdir(tmp_path)
    own = ("import=[of_values]", "method=of_values")
    notes = plan("simclr/digits", words(tmp_path, "run", *own)).notes
    assert "the network is first built in the job; without memory: Tensor.item" in str(notes)


def test_one_cpu_is_singular(tmp_path: Path) -> None:
    lines = plan("simclr/digits", words(tmp_path, "run")).describe()
    assert "1 CPU a rank; else launch.slurm.cpus_per_task=N" in lines


def test_from_inside_of_a_job(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch would take the settings of the job around it for those of the new one."""
    around = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "3", "SRUN_DEBUG": "3"}
    around["SBATCH_MEM_BIND_TYPE"] = "none"
    of_user = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "mine"}
    for name, value in {**around, **of_user}.items():
        monkeypatch.setenv(name, value)
    fake("sbatch", f"env > {tmp_path}/seen; echo Submitted batch job 77")
    fake("squeue", "exit 0")
    fake("sinfo", "exit 1")  # a real one looks for the file of SLURM_CONF for a minute
    (made,) = plan("simclr/digits", words(tmp_path, "run")).submit()
    assert made.job_id == "77"
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert not seen & around.keys() and of_user.keys() <= seen
    assert {name: os.environ[name] for name in around} == around, "here they are as before"


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
