"""``selftask train`` with comma lists: order, signals, the table, and a sweep of two real runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tiny
from selftask.cli.main import main
from selftask.run.local_sweep import Run, Sweep

SLOW_CHILD = """
import pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def stop(*_):
    (out / "stopped").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(out / "started").write_text(str(time.monotonic()))
time.sleep(float(sys.argv[2]))
(out / "ended").write_text(str(time.monotonic()))
sys.exit(int(sys.argv[3]))
"""


def runs_of(folder: Path, seconds: float, codes: list[int]) -> list[Run]:
    return [
        Run(
            str(place),
            folder / str(place),
            [sys.executable, "-c", SLOW_CHILD, str(folder / str(place)), str(seconds), str(code)],
            1,
        )
        for place, code in enumerate(codes)
    ]


def test_at_most_so_many_run_at_a_time(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, 1.0, [0, 7, 0])
    assert Sweep(runs, 2).wait() == 7, "the others are trained all the same"
    starts, ends = (
        [float((run.out / name).read_text()) for run in runs] for name in ("started", "ended")
    )
    assert starts[1] < ends[0], "two side by side"
    assert starts[2] > min(ends[:2]), "the third waits for a place"


SEEN = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
(out / "gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
while len([*out.parent.glob("*/gpus")]) < int(sys.argv[2]):
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("visible", "processes", "expected"),
    [
        ("4,5,6,7", 1, {"4", "5"}),
        ("4,5,6,7", 2, {"4,5", "6,7"}),
        ("GPU-a", 1, {"GPU-a"}),  # both share it
        ("4,5,6", 2, {"4,5,6"}),
        ("", 1, {""}),
    ],
)
def test_runs_at_the_same_time_have_their_own_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    processes: int,
    expected: set[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    folders = [tmp_path / name for name in ("a", "b")]
    commands = [[sys.executable, "-c", SEEN, str(folder), "2"] for folder in folders]
    runs = [Run(f.name, f, c, processes) for f, c in zip(folders, commands, strict=True)]
    assert Sweep(runs, 2).wait() == 0
    assert {(folder / "gpus").read_text() for folder in folders} == expected


def test_a_signal_reaches_the_runs_and_starts_no_others(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, 60, [0, 0])

    def send() -> None:
        while not (runs[0].out / "started").exists():
            time.sleep(0.02)
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=send).start()
    assert Sweep(runs, 1).wait() == 143
    assert (runs[0].out / "stopped").exists() and not runs[1].out.exists()
    assert signal.getsignal(signal.SIGTERM) is before


CTRL_C = """
import os, pathlib, signal, sys, threading, time
from selftask.run.local_sweep import Run, Sweep
terminal, folder, *command = sys.argv[1:]
out = pathlib.Path(folder)
if terminal:
    os.open(terminal, os.O_RDWR)  # the first one of a session is its terminal
def press():
    while not (out / "started").exists():
        time.sleep(0.02)
    signal.raise_signal(signal.SIGINT)
threading.Thread(target=press).start()
Sweep([Run("0", out, command, 1)], 1).wait()
"""


@pytest.mark.parametrize("in_terminal", [True, False])
def test_ctrl_c_reaches_the_runs_once(tmp_path: Path, in_terminal: bool) -> None:
    """A terminal sends it to them, too, and a second one makes a run leave unsaved."""
    (run,) = runs_of(tmp_path, 1.0, [0])
    master, slave = os.openpty()
    words = [os.ttyname(slave) if in_terminal else "", str(run.out), *run.command]
    with open(master, "rb"), open(slave, "rb"):
        environment = tiny.environment()
        subprocess.run(
            [sys.executable, "-c", CTRL_C, *words],
            check=True,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
    assert (run.out / "ended").exists() is in_terminal, "only the sweep itself got a signal here"


def test_mistakes_of_all_runs_are_reported_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simclr", "data=digits", f"out={tmp_path / 'sweep'}", "train.epochs=0,-1"]
    assert main(["train", *words]) == 2
    printed = capsys.readouterr().err
    assert "train.epochs=0" in printed and "train.epochs=-1" in printed
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_sweep_trains_resumes_and_ends_in_a_table(tmp_path: Path) -> None:
    more = ("train.seed=1,2", "train.max_steps=4", "launch.parallel_runs=2")
    command = tiny.command("simclr", tmp_path, "sweep", *more)
    done = tiny.run(command, tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"2 runs in {tmp_path}/sweep, 2 at a time")
    assert lines[-3].split()[:4] == ["RUN", "METHOD", "STATE", "STEP"]
    assert [line.split()[:4] for line in lines[-2:]] == [
        ["sweep/seed_1", "simclr", "finished", "4/4"],
        ["sweep/seed_2", "simclr", "finished", "4/4"],
    ]
    losses = [
        json.loads((tmp_path / "sweep" / name / "metrics.jsonl").read_text().splitlines()[-1])
        for name in ("seed_1", "seed_2")
    ]
    assert losses[0] != losses[1]
    again = tiny.run(command, tmp_path)
    assert again.stdout.splitlines()[-3:] == lines[-3:], "finished runs are not trained again"
