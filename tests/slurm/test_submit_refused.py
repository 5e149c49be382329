"""``selftask submit``: mistakes are printed before anything reaches a cluster."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from submit_words import Fake, submit, words

import tiny
from selftask.config.checks.sbatch import minutes, show_minutes
from selftask.config.schema import LaunchConfig
from selftask.errors import UserError
from selftask.slurm import queue
from selftask.slurm.job import executor
from selftask.slurm.plan import plan

pytestmark = pytest.mark.usefixtures("small_words")


def test_all_mistakes_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("launch.slurm.partion=x", "launch.slurm.time=5h", "launch.slurm.nodes=3")
    assert submit(tmp_path, *wrong, "launch.slurm.setup=x", "train.batch_size=7", "launch.nodes=2")
    printed = capsys.readouterr().err
    assert "sbatch has no option --partion; did you mean 'partition'?" in printed
    assert "launch.slurm.time='5h': expected minutes, h:mm:ss or days-hours" in printed
    assert "launch.slurm.nodes is set by selftask; use launch.nodes" in printed
    assert "launch.slurm.setup='x': expected a list" in printed
    assert "train.batch_size=7" in printed
    assert "Traceback" not in printed


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
        (["optimizer.groups=[{match: stem9, lr: 1}]"], "'stem9': matches no trained parameter"),
        (["optimizer.schedule={name: wsd, cooldown: 80%}", "optimizer.warmup=50%"], "no room"),
    ],
)
def test_bad_slurm_settings_are_refused(
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
    with pytest.raises(UserError, match=r"run_%j/evaluations: sbatch replaces %"):
        executor(LaunchConfig(), tmp_path / "run_%j/evaluations/slurm", "of a suite")


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ('out="FOLDER/a\\n#SBATCH --uid=0"', "out"),
        ('launch.slurm.comment="a\\n#SBATCH --uid=0"', "comment"),
    ],
)
def test_a_line_break_begins_no_line_of_the_script(tmp_path: Path, more: str, key: str) -> None:
    text = more.replace("FOLDER", str(tmp_path)).replace("\\n", "\n")
    with pytest.raises(UserError, match=rf"{key}: '.*a\\n#SBATCH --uid=0.*' *: the sbatch script"):
        plan("simclr/digits", [*words(tmp_path, "run"), text])


def test_out_is_a_place_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = words(tmp_path, "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        plan("simclr/digits", [*given, f"out={tmp_path}/file/run"])
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="0 MB are free"):
        plan("simclr/digits", given)


def test_without_a_cluster_says_so(
    tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """submitit looks for srun, too, before an array: what is missing is one line."""
    assert submit(tmp_path) == 2
    assert "there is no sbatch on this machine: submit from" in capsys.readouterr().err
    assert submit(tmp_path, "train.seed=1,2") == 2
    assert "there is no sbatch and no srun on this machine" in capsys.readouterr().err
    sbatch = tmp_path / "empty" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho Submitted batch job 77")
    sbatch.chmod(0o755)
    assert submit(tmp_path, "train.seed=1,2") == 2
    assert "there is no srun on this machine: submit from" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


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


def test_hidden_partitions_and_that_of_the_environment(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "echo 'short*|0:30:00|(null)\ngpu|1-00:00:00|gpu:8'"
    fake("sinfo", f"{listed}; [ $1 = --all ] && echo 'own|infinite|gpu:4'")
    options = ("launch.slurm.partition=own", "launch.slurm.time=3-0", "train.device=auto")
    assert "--gpus-per-node=1" in plan("simclr/digits", words(tmp_path, "run", *options)).script()
    with pytest.raises(UserError, match="short allows at most 30 min"):
        plan("simclr/digits", words(tmp_path, "run", "launch.slurm.time=90"))
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")  # overrides what the script says
    planned = plan("simclr/digits", words(tmp_path, "run", "launch.slurm.time=90"))
    assert "partition gpu\n" in planned.describe()
    monkeypatch.setenv("SBATCH_PARTITION", "gpus")
    with pytest.raises(UserError, match="SBATCH_PARTITION=gpus: no partition"):
        plan("simclr/digits", words(tmp_path, "run"))


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
def test_slurm_time_limits_are_converted_to_minutes(time: Any, expected: int | None) -> None:
    assert minutes(time) == expected


def test_minutes_are_shown_so_that_slips_are_seen() -> None:
    assert show_minutes(3661) == "2 d 13 h 1 min"
    assert show_minutes(60) == "1 h"
