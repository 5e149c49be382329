"""Job ids that somebody else wrote into a folder: no process and no job but its own is touched."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from run_folders import write_run
from selftask.cli.main import main
from selftask.slurm import queue

Fake = Callable[[str, str], None]  # of conftest


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that would have been sent; none is."""
    signals: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        if number:
            signals.append((pid, number))

    monkeypatch.setattr(os, "kill", kill)
    return signals


def record(run: Path, job: Any) -> None:
    (run / "slurm").mkdir(parents=True, exist_ok=True)
    (run / "slurm/jobs.json").write_text(json.dumps({str(run): job}))


@pytest.mark.parametrize(
    "job",
    [
        *("local--1", "local-0", "local-1;x", "local-", "local-\u0661", "--user=root", "-u root"),
        *("7_0 --user=root", "12\n", "12+1", "", 12, ["12"], None, {"a": 1}),
    ],
)
def test_what_is_no_job_id_is_cancelled_by_nobody(
    job: Any,
    sent: list[tuple[int, int]],
    tmp_path: Path,
    fake: Fake,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``local--1`` ended every process of the user."""
    for command in ("scancel", "squeue", "scontrol", "sacct", "ps", "pgrep"):
        fake(command, f'echo {command} "$@" >> {tmp_path}/called; exit 1')
    run = write_run(tmp_path / "run")
    record(run, job)
    assert main(["cancel", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "slurm/jobs.json: cannot be read" in line and "is no job id" in line
    for words in (["runs"], ["jobs"]):
        assert main([*words, str(run)]) == 0
        assert "cannot be read: slurm/jobs.json" in capsys.readouterr().out
    called = (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""
    assert all(line.split()[:2] == ["squeue", "--noheader"] for line in called.splitlines())
    assert sent == []


def test_jobs_of_runs_elsewhere_are_not_cancelled(
    tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of a copied folder, such as one that was received, is about other runs."""
    fake("scancel", f"touch {tmp_path}/called")
    run = write_run(tmp_path / "copy")
    record(run, "12")
    (run / "slurm/jobs.json").write_text(json.dumps({str(tmp_path / "original"): "12"}))
    assert main(["cancel", str(run)]) == 2
    assert "neither a job's id nor a submitted run" in capsys.readouterr().err
    assert not (tmp_path / "called").exists()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that wait, with a command line of one's choice, and ends them."""
    children: list[subprocess.Popen[bytes]] = []

    def popen(*words: str) -> subprocess.Popen[bytes]:
        code = "import time; print(flush=True); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        children.append(child)
        return child

    yield popen
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("by_shell", [False, True])
def test_a_local_job_is_cancelled_and_nothing_else(
    by_shell: bool,
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process id must be that of the job: by its command line, folder and start."""
    run, other = write_run(tmp_path / "Jürgen's run"), write_run(tmp_path / "other")
    stranger = start()
    of_other = start("submitit.local._local", str(other / "slurm"))
    folder = str(run / "slurm")
    own = start("submitit.local._local", shlex.quote(folder) if by_shell else folder)
    record(other, f"local-{of_other.pid}")
    for child in (stranger, of_other):
        record(run, f"local-{child.pid}")
        assert main(["cancel", str(run)]) == 2
        assert "is not running on this machine" in capsys.readouterr().err
    record(run, f"local-{own.pid}")
    past = time.time() - 3600
    os.utime(run / "slurm/jobs.json", (past, past))  # recorded before the process began
    assert main(["cancel", str(run)]) == 2
    assert queue.queue([f"local-{own.pid}"]) == {f"local-{own.pid}": "gone"}
    record(run, f"local-{own.pid}")
    queue.note(run, {run / "seed_1": f"local-{stranger.pid}"})  # has ended, as some of a sweep
    past = time.time() - 30
    os.utime(run / "slurm/jobs.json", (past, past))  # by the clock of a file server
    assert queue.queue([f"local-{own.pid}"]) == {f"local-{own.pid}": "RUNNING"}
    assert main(["cancel", str(run)]) == 0
    assert own.wait(10) == -signal.SIGTERM
    assert stranger.poll() is None and of_other.poll() is None
