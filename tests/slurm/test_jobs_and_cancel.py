"""``selftask jobs`` and ``cancel``, with SLURM's programs replaced by shell lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from run_folders import write_run
from selftask.cli.main import main
from selftask.errors import UserError
from selftask.logs import write_json
from selftask.report.overview.run_line import RunLine
from selftask.slurm import queue

Fake = Callable[[str, str], None]  # of conftest


def test_jobs_shows_state_step_and_last_line(
    tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("going", "waiting", "back", "done", "gone", "taken")
    for name in names:
        (tmp_path / "s" / name).mkdir(parents=True)
    runs = {tmp_path / "s" / name: f"7_{number}" for number, name in enumerate(names)}
    queue.note(tmp_path / "s", runs)
    states = {"going": "running", "back": "requeued", "done": "finished", "gone": "running"}
    for name, state in {**states, "taken": "running"}.items():
        write_json(tmp_path / "s" / name / "status.json", {"state": state})
    for name in ("gone", "taken"):
        (tmp_path / "s" / name / ".lock").touch()
        os.utime(tmp_path / "s" / name / ".lock", (0, 0))
    (tmp_path / "s/going/log.txt").write_text("first\nstep 8  loss 1.2\n")
    (tmp_path / "s/going/metrics.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    fake("squeue", "echo '7_0|RUNNING|None\n7_1|PENDING|Resources\n7_2|PENDING|BeginTime'")
    fake("scontrol", '[ $4 = 7_5 ] && echo "JobId=9 JobState=CANCELLED" || exit 1')
    fake("sacct", "exit 1")  # as where no accounts are kept
    assert main(["jobs", str(tmp_path / "s")]) == 0
    shown = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[2] for line in shown] == ["8", "-", "-", "-", "-", "-"]
    assert [" ".join(line[3].split()).partition(" no heartbeat")[0] for line in shown] == [
        "running step 8 loss 1.2",
        "pending (resources)",
        "requeued, pending (begintime)",
        "finished",
        "lost: job unknown to SLURM",
        "cancelled",
    ]
    assert [run.folder.name for run in queue.run_lines([tmp_path / "s" / "back"])] == ["back"]
    with pytest.raises(UserError, match="no submitted run"):
        queue.find([tmp_path])


def test_ended_jobs_are_looked_up_at_once(tmp_path: Path, fake: Fake) -> None:
    """A sweep may have hundreds, and `runs --watch` asks every two seconds."""
    fake("squeue", "exit 0")
    fake("sacct", f"echo >> {tmp_path}/asked; echo '7_0|COMPLETED\n7_1|CANCELLED by 5'")
    fake("scontrol", "echo JobId=8 JobState=FAILED")
    states = queue.queue(["7_0", "7_1", "8"])
    assert states == {"7_0": "COMPLETED", "7_1": "CANCELLED by 5", "8": "FAILED"}
    assert (tmp_path / "asked").read_text() == "\n"


def test_cancel_by_folder_and_by_id(
    tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "s").symlink_to("scratch")
    queue.note(tmp_path / "s", {tmp_path / "s" / "a": "7_0", tmp_path / "s" / "b": "7_1"})
    fake("scancel", f'echo "$@" >> {tmp_path}/cancelled')
    for words in ([str(tmp_path / "s"), "31"], [str(tmp_path / "s" / "b")]):
        assert main(["cancel", *words]) == 0
    assert (tmp_path / "cancelled").read_text() == "-- 7_0 7_1\n-- 31\n-- 7_1\n"
    assert main(["cancel", "nowhere"]) == 2
    fake("scancel", "echo 'Invalid job id' >&2; exit 1")
    assert main(["cancel", "31"]) == 2
    assert "Invalid job id" in capsys.readouterr().err


def test_waiting_prints_each_job_once_it_has_ended(
    tmp_path: Path,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`jobs --wait`: a job that is requeued is waited for; one that failed is the exit code."""
    runs = {tmp_path / "s" / name: job for name, job in (("a", "7_0"), ("b", "7_1"))}
    for run in runs:
        write_run(run, "running")
    queue.note(tmp_path / "s", runs)
    looks = iter(
        [
            (99, "RUNNING", "RUNNING"),  # the controller is restarted
            (0, "RUNNING", "RUNNING"),
            (2, "RUNNING", "RUNNING"),  # it is busy and answers the third question
            (0, "REQUEUED", "COMPLETED"),
            (0, "FAILED", "COMPLETED"),
        ]
    )
    listed, fails = tmp_path / "listed", tmp_path / "fails"
    fake(
        "squeue",
        f"n=$(cat {fails}); echo $((n - 1)) >{fails}; [ $n -gt 0 ] && exit 1; cat {listed}",
    )
    for name in ("sacct", "scontrol"):
        fake(name, "exit 1")
    slept: list[float] = []

    def look(seconds: float = 30.0) -> None:
        slept.append(seconds)
        num_failures, *states = next(looks)
        fails.write_text(f"{num_failures}")
        listed.write_text(
            "".join(f"{j}|{s}|None\n" for j, s in zip(runs.values(), states, strict=True))
        )
        for run, state in zip(runs, states, strict=True):
            if state in ("COMPLETED", "FAILED"):
                write_run(run, "finished" if state == "COMPLETED" else "failed")

    look()
    alone = SimpleNamespace(**{**vars(time), "sleep": look})  # subprocess sleeps, too
    monkeypatch.setattr(queue, "time", alone)
    assert main(["jobs", str(tmp_path / "s"), "--wait"]) == 1
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(words[0], words[2]) for words in printed] == [("7_1", "finished"), ("7_0", "failed")]
    assert slept == [30.0] * 5


@pytest.mark.parametrize(
    ("of_run", "in_slurm", "shown"),
    [
        ("not started", "CONFIGURING", "configuring"),  # its nodes are booted
        ("requeued", "CONFIGURING", "requeued, configuring"),
        ("requeued", "SPECIAL_EXIT", "requeued, special_exit"),
        ("hung", "SUSPENDED", "suspended"),  # no process of it runs
        ("running", "STOPPED", "stopped"),
        ("running", "SIGNALING", "running"),
        ("finished", "STAGE_OUT", "finished"),
        ("running", "NODE_FAIL", "lost: job node_fail"),
    ],
)
def test_states_of_jobs_that_have_not_ended(of_run: str, in_slurm: str, shown: str) -> None:
    assert queue.with_job(RunLine(Path("run"), of_run), "7", in_slurm).state == shown
    assert (in_slurm in queue.WAITING) == (in_slurm != "NODE_FAIL")


def test_a_local_job_of_the_hour_that_comes_twice(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When clocks go back, a running job seemed to have started after it was recorded."""
    started = 1_792_888_200  # 2:30, half an hour before the clocks go back to 2:00
    (tmp_path / "jobs.json").write_text("{}")
    os.utime(tmp_path / "jobs.json", (started, started))
    began = f"date -d @{started} '+%a %b %d %H:%M:%S %Y'"
    fake("ps", f'echo "$({began}) python -m submitit.local._local {tmp_path}"')
    with monkeypatch.context() as there:
        there.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        states = queue.queue(["local-7"])
    time.tzset()
    assert states == {"local-7": "RUNNING"}
