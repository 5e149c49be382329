"""``selftask submit --cluster local`` and ``debug``: submitit's executors on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from selftask.cli.main import main
from selftask.errors import UserError
from selftask.hooks.stopping.fault_injection import InjectedFault
from selftask.logs import read_json, write_json
from selftask.slurm import local_rank, queue

Fake = Callable[[str, str], None]  # of conftest


def wait_for(path: Path, text: str, seconds: float = 240.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and text in (content := path.read_text()):
            return content
        time.sleep(0.1)
    raise AssertionError(f"{path} never had {text!r}")


def words_of(folder: Path, *more: str) -> list[str]:
    return ["simclr/digits", *tiny.overrides("simclr", folder, "run", *more)]


def ranks_of(job: str) -> list[int]:
    """Process ids of its two ranks."""
    command = ["pgrep", "-P", job.removeprefix("local-")]
    output = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert len(output) == 2
    return [int(pid) for pid in output]


@pytest.mark.slow
def test_a_local_job_is_requeued_and_ends_as_if_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("launch.processes=2", "train.epochs=400", "launch.slurm.time=30")
    given = words_of(tmp_path, *more)
    environment = tiny.environment(PYTHONUNBUFFERED="1")
    command = ["selftask", "submit", *given, "--cluster", "local"]
    started = subprocess.run(
        [sys.executable, "-m", *command], env=environment, cwd=tmp_path, capture_output=True
    )
    assert started.returncode == 0, started.stderr.decode()
    out = tmp_path / "run"
    (job,) = queue.noted(out).values()
    assert job.startswith("local-") and queue.queue([job]) == {job: "RUNNING"}
    wait_for(out / "metrics.jsonl", '"step": 3')
    for pid in ranks_of(job):
        os.kill(pid, signal.SIGUSR2)  # what submitit sends before the time limit
    log = wait_for(out / "log.txt", "RUN finished")
    assert "RUN interrupted by SIGUSR2" in log and "the local job starts it again" in log
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()]
    assert steps == sorted(set(steps)) and steps[-1] == 400 * tiny.STEPS_PER_EPOCH
    main(["jobs", str(out)])
    assert "finished" in capsys.readouterr().out


@pytest.mark.slow
def test_a_local_job_is_requeued_so_often_and_no_more(tmp_path: Path) -> None:
    more = ("launch.processes=2", "train.epochs=4000", "launch.slurm.time=30")
    given = words_of(tmp_path, *more, "launch.max_requeues=2")
    command = [sys.executable, "-m", "selftask", "submit", *given, "--cluster=local"]
    subprocess.run(command, env=tiny.environment(), cwd=tmp_path, check=True)
    out = tmp_path / "run"
    (job,) = queue.noted(out).values()
    for message in ("1 of 2 requeues left", "0 of 2 requeues left", "max_requeues=2 is used up"):
        wait_for(out / "metrics.jsonl", '"step": ')
        for pid in ranks_of(job):
            os.kill(pid, signal.SIGUSR2)
        wait_for(out / "log.txt", message)
        (out / "metrics.jsonl").unlink()  # the next attempt writes another
    assert read_json(out / "status.json")["state"] == "interrupted"
    deadline = time.monotonic() + 60
    while queue.queue([job]) == {job: "RUNNING"} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert queue.queue([job]) != {job: "RUNNING"}, "nobody starts it again"


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["", "'export A=b'"])
def test_a_cancelled_local_job_saves_and_stops(setup: str, tmp_path: Path) -> None:
    """With set-up lines the job is that of a shell, which starts the ranks."""
    more = ("train.epochs=2000", "launch.slurm.time=30", f"launch.slurm.setup=[{setup}]")
    given = words_of(tmp_path, *more)
    command = [sys.executable, "-m", "selftask", "submit", *given, "--cluster=local"]
    subprocess.run(command, env=tiny.environment(), cwd=tmp_path, check=True)
    out = tmp_path / "run"
    wait_for(out / "metrics.jsonl", '"step": 3')
    assert main(["cancel", str(out)]) == 0
    assert "checkpoint saved" in wait_for(out / "log.txt", "RUN interrupted by SIGTERM")
    assert read_json(out / "status.json")["state"] == "interrupted"


@pytest.mark.slow
def test_a_local_job_is_cancelled_before_its_run_begins(tmp_path: Path) -> None:
    """Imports take long on a busy machine or a slow disk, here those of a plug-in."""
    slow = "import os, time\nif 'SUBMITIT_LOCAL_JOB_ID' in os.environ:\n    "
    slow += "open('begun', 'w').write('yes')\n    time.sleep(300)\n"
    (tmp_path / "slow.py").write_text(slow)
    words = words_of(tmp_path, "import=[slow]")
    command = [sys.executable, "-m", "selftask", "submit", *words, "--cluster=local"]
    subprocess.run(command, env=tiny.environment(), cwd=tmp_path, check=True)
    wait_for(tmp_path / "begun", "yes")
    assert main(["cancel", str(tmp_path / "run")]) == 0
    (job,) = queue.noted(tmp_path / "run").values()
    deadline = time.monotonic() + 60
    while queue.queue([job]) == {job: "RUNNING"} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert queue.queue([job]) == {job: "gone"}


@pytest.mark.slow
def test_a_local_job_that_dies_before_its_run_begins_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two jobs beside modules that shadow others, one has a plug-in that fails in the job."""
    (tmp_path / "submitit.py").write_text("raise ValueError('of the current folder')\n")
    (tmp_path / "selftask").mkdir()
    fails = (
        "import os\nif 'SUBMITIT_LOCAL_JOB_ID' in os.environ:\n    raise KeyError('only here')\n"
    )
    (tmp_path / "mine.py").write_text(fails)
    outs = [tmp_path / "run", tmp_path / "good"]
    for out, more in zip(outs, (["import=[mine]"], ["train.max_steps=1"]), strict=True):
        words = words_of(tmp_path, f"out={out}", *more)
        command = [sys.executable, "-P", "-m", "selftask", "submit", *words, "--cluster=local"]
        subprocess.run(command, env=tiny.environment(), cwd=tmp_path, check=True)
    line = wait_for(outs[0] / "log.txt", "RUN FAILED before it began: ").splitlines()[-1]
    assert "import: 'mine' failed at mine.py:3: KeyError: 'only here'" in line
    assert read_json(outs[0] / "status.json")["state"] == "failed"
    wait_for(outs[1] / "log.txt", "RUN finished")
    capsys.readouterr()
    for command in (["jobs", str(outs[0])], ["runs", str(tmp_path)]):
        assert main(command) == 0
        assert "only here" in capsys.readouterr().out


def test_a_rank_that_dies_before_its_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has written a status itself keeps it, unless that was before a requeue."""
    job = {"JOB_ID": "78", "GLOBALID": "0", "NTASKS": "1"}
    for name, value in job.items():
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{name}", value)
    monkeypatch.setenv(local_rank.OUT, str(tmp_path))

    def start() -> None:
        raise UserError("no data\nno labels")

    monkeypatch.setattr(local_rank, "submitit_main", start)
    states = ((None, "failed"), ("requeued", "failed"), ("interrupted", "interrupted"))
    for state, expected in states:
        if state is not None:
            write_json(tmp_path / "status.json", {"state": state, "attempt": "local:78"})
        with pytest.raises(UserError):
            local_rank.main()
        assert read_json(tmp_path / "status.json")["state"] == expected
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("RUN FAILED before it began: no data; no labels")


@pytest.mark.parametrize("name", ["4194305_0_log.err", "controller.err"])
def test_the_last_words_of_a_lost_job_are_shown(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a status nor a log: what its processes have written to their error file."""
    queue.note(tmp_path / "s", {tmp_path / "s/one": "local-4194305"})  # no such process id
    (tmp_path / "s/slurm" / name).write_text("Traceback ...\nImportError: no selftask here\n\n")
    for command in ("jobs", "runs"):
        assert main([command, str(tmp_path / "s")]) == 0
        shown = capsys.readouterr().out
        assert "lost: job gone" in shown and "ImportError: no selftask here" in shown


def test_a_local_job_of_another_machine_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen from a second login node, its process id names nothing, and its run shows life."""
    queue.note(tmp_path / "run", {tmp_path / "run": "local-4194305"})
    status = {"state": "running", "host": "login2", "pid": 4194306}
    write_json(tmp_path / "run/status.json", status)
    (tmp_path / "run/.lock").touch()
    assert main(["jobs", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.split("\n")[1].split()[3] == "running"


@pytest.mark.parametrize(
    ("more", "seen", "gpus"),
    [
        (["train.device=auto"], None, "0,1"),
        (["train.device=auto"], "GPU-5f,3,7", "GPU-5f,3"),
        (["launch.slurm.gpus_per_node=a100:1"], "5,6", "5"),
        (["train.device=cpu"], "5,6", ""),
    ],
)
def test_what_a_local_job_is_given(
    more: list[str], seen: str | None, gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    controllers: list[dict[str, Any]] = []

    def start(**given: Any) -> Any:
        controllers.append({**given, "signal": os.environ["SUBMITIT_PREEMPT_SIGNAL"]})
        return SimpleNamespace(pid=78)

    monkeypatch.setattr("submitit.local.local.start_controller", start)
    options = ("launch.processes=2", "launch.slurm.time=1:30:00", "launch.slurm.signal_delay_s=50")
    words = words_of(tmp_path, *options, *more)
    assert main(["submit", *words, "--cluster=local"]) == 0
    (given,) = controllers
    assert (given["tasks_per_node"], given["cuda_devices"]) == (2, gpus)
    assert (given["timeout_min"], given["signal_delay_s"], given["signal"]) == (90, 50, "USR2")
    out = tmp_path / "run"
    assert queue.noted(out) == {out: "local-78"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cluster", "slrm"], "--cluster slrm"),
        (["--cluster=local", "--dry-run"], "--dry-run: --cluster local has no sbatch script"),
        (["--cluster=local", "launch.nodes=2"], "launch.nodes=2: --cluster local is one machine"),
        (["--cluster=debug", "train.seed=1,2"], "one run in this process: no sweep"),
    ],
)
def test_wrong_clusters_nodes_and_sweeps_are_refused(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *words_of(tmp_path), *more]) == 2
    assert message in capsys.readouterr().err


def test_slurm_is_the_default_and_debug_trains_in_this_process(
    tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("sbatch", "echo Submitted batch job 77")
    fake("squeue", "exit 0")
    given = words_of(tmp_path, "train.max_steps=2")
    for cluster in ((), ("--cluster", "slurm")):
        assert main(["submit", *given, *cluster]) == 0
        assert "submitted as job 77" in capsys.readouterr().out
        assert queue.noted(tmp_path / "run") == {tmp_path / "run": "77"}
    assert not (tmp_path / "run/metrics.jsonl").exists()

    shutil.rmtree(tmp_path / "run")
    assert main(["submit", *given, "--cluster=debug"]) == 0
    assert [row["step"] for row in tiny.rows(tmp_path / "run")] == [1, 2]

    stopped_at: list[BaseException] = []
    monkeypatch.setattr("pdb.post_mortem", lambda *_: stopped_at.append(sys.exc_info()[1]))
    more = ("hooks.fault_injection={at: 1}", "resume=never")
    with pytest.raises(InjectedFault):
        main(["submit", *given, *more, "--cluster=debug"])
    assert [type(error) for error in stopped_at] == [InjectedFault]
