"""The folder of a run: one run at a time has it, and none before the run begins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import IO

import pytest
from in_process import train

import tiny
from selftask.cli.main import main
from selftask.errors import UserError
from selftask.run import run_folder


def test_a_run_that_does_not_begin_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is there stays; so does that of a run which began and failed."""
    (tmp_path / "file").write_text("no folder")
    stage = f"data.stage_to={tmp_path / 'file' / 'copies'}"
    (tmp_path / "mine").mkdir()
    (tmp_path / "runs" / "others").mkdir(parents=True)
    for out in ("new/inner/run", "runs/run", "mine"):
        words = tiny.overrides("simclr", tmp_path, out, stage)
        assert main(["train", "simclr/digits", *words]) == 2
        assert "data.stage_to" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["others"]
    assert (tmp_path / "mine" / "log.txt").exists()

    words = tiny.overrides("simclr", tmp_path, "failed", "hooks.memory_snapshot={}")
    assert main(["train", "simclr/digits", *words]) == 2
    assert tiny.status(tmp_path / "failed")["state"] == "failed"


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "a+")
fcntl.lockf(lock, fcntl.LOCK_EX)
lock.truncate(0)
print("process 7 on node3", file=lock, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_runs_in_one_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "train.stop_at=1") == 75
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    command = [sys.executable, "-c", HOLDER, folder / "run" / ".lock"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert train(folder) == 2
        other.communicate()
    expected = (
        "run: process 7 on node3 is training there; wait for it, stop it, or use another out="
    )
    assert expected in capsys.readouterr().err
    before.pop(folder / "run" / ".lock")
    assert all(path.read_bytes() == content for path, content in before.items())
    assert train(folder, "train.stop_at=2") == 75  # the lock ended with its process


def hold(folder: Path, job: str, host: str, seconds: float) -> subprocess.Popen[str]:
    """A process that has the folder's lock, as of a job on a host; touches it so long."""
    code = (
        "import fcntl, os, sys, time; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "f.truncate(0); print(sys.argv[2], file=f, flush=True); print('held', flush=True)\n"
        "end = time.monotonic() + float(sys.argv[3])\n"
        "while time.monotonic() < end: os.utime(sys.argv[1]); time.sleep(0.05)\n"
        "sys.stdin.read()"
    )
    words = [folder / run_folder.LOCK, f"process 7 on {host}\njob {job}", str(seconds)]
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize(
    ("job", "host", "taken"),
    [("12", "node3", True), ("13", "node3", False), ("12", socket.gethostname(), False)],
)
def test_a_requeued_job_takes_over_from_a_dead_node_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, host: str, taken: bool
) -> None:
    """An earlier attempt of the same job, on another machine, that gives no sign of life."""
    monkeypatch.setattr(run_folder, "TAKE_OVER_S", 0.4)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    started = time.monotonic()
    with hold(tmp_path, job, host, seconds=1.0) as other:
        if taken:
            with run_folder.locked(str(tmp_path), first=True):
                assert time.monotonic() - started > 1.0  # as long as it lived, and a little more
        else:
            with (
                pytest.raises(UserError, match="process 7"),
                run_folder.locked(str(tmp_path), first=True),
            ):
                raise AssertionError("taken")
        other.communicate()


def test_a_refused_run_does_not_remove_the_folder_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both began before the folder was there, and the other one has written nothing but its log."""
    folder = tmp_path / "run"

    def refused(lock: IO[str], path: Path, out: str) -> None:
        (folder / "log.txt").write_text("of the other run")
        raise UserError("held")

    monkeypatch.setattr(run_folder, "_lock_folder", refused)
    with (
        pytest.raises(UserError, match="held"),
        run_folder.locked(str(folder), first=True, alone=True),
    ):
        raise AssertionError("taken")
    assert sorted(path.name for path in folder.iterdir()) == [run_folder.LOCK, "log.txt"]


def test_a_run_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "TOUCH_S", 0.05)
    with run_folder.locked(str(tmp_path), first=True):
        lock = tmp_path / run_folder.LOCK
        os.utime(lock, (0, 0))
        time.sleep(0.5)
        assert lock.stat().st_mtime > 0


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("a_file", "out=a_file: cannot be written to (a_file is a file, or a link to a folder"),
        ("link/run", "out=link/run: cannot be written to (link is a file, or a link to a folder"),
        (" ", "out is empty; give a folder"),
    ],
)
def test_no_folder_to_run_in(
    folder: Path, capsys: pytest.CaptureFixture[str], out: str, message: str
) -> None:
    (folder / "a_file").write_text("")
    (folder / "link").symlink_to(folder / "not_mounted")
    assert main(["train", "simclr/digits", *tiny.overrides("simclr", folder), f"out={out}"]) == 2
    assert message in capsys.readouterr().err


def test_what_a_power_cut_emptied(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "train.stop_at=2") == 75
    (folder / "run" / "status.json").write_text("")
    assert train(folder, "train.stop_at=3") == 75
    (folder / "run" / "config.yaml").write_text("")
    assert train(folder) == 2
    assert "config.yaml: is damaged" in capsys.readouterr().err


def test_before_the_run_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, "train.epoch=3") == 2
    error = capsys.readouterr().err
    assert "did you mean 'train.epochs'?" in error
    assert "Traceback" not in error
    assert not (folder / "run").exists()
