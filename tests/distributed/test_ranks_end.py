"""Several ranks on one machine: the same result as one, and an end that names who was at fault."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny

TWO = "launch.processes=2"


def words(folder: Path, out: str, *more: str, method: str = "simclr") -> list[str]:
    command = ["-m", "selftask", "train", f"{method}/digits"]
    return [*command, *tiny.overrides(method, folder, out, *more)]


def train(
    folder: Path, out: str, *more: str, launcher: tuple[str, ...] = (), method: str = "simclr"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, *words(folder, out, *more, method=method)],
        env=tiny.environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def orphans(out: str) -> list[str]:
    """Processes that still have the run's folder on their command line."""
    results = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if out in line and int(entry.parent.name) != os.getpid():
            results.append(line)
    return results


def check_failed(done: subprocess.CompletedProcess[str], out: Path, rank: int, cause: str) -> None:
    assert done.returncode != 0
    last = (done.stdout + done.stderr).rstrip().splitlines()[-1]
    assert re.search(rf"RUN FAILED .*on rank {rank}: .*{cause}", last), done.stdout + done.stderr
    assert "finished" not in done.stdout
    status = tiny.status(out)
    assert (status["state"], status["rank"]) == ("failed", rank)
    assert re.search(cause, status["error"])
    assert orphans(str(out)) == []


def test_a_rank_that_raises_is_named(tmp_path: Path) -> None:
    done = train(tmp_path, "run", TWO, "hooks.fault_injection={at: 3, rank: 1}")
    check_failed(done, tmp_path / "run", 1, "InjectedFault")
    assert "InjectedFault" in (tmp_path / "run/errors/rank1.txt").read_text()
    assert "in on_forward" in done.stdout  # its traceback, on rank 0's log
    assert "threads: " in (tmp_path / "run/log_rank1.txt").read_text(), "a log of its own"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_killed_is_named(tmp_path: Path, rank: int) -> None:
    start = time.monotonic()
    done = train(tmp_path, "run", TWO, f"hooks.fault_injection={{at: 3, rank: {rank}, kind: kill}}")
    check_failed(done, tmp_path / "run", rank, rf"rank {rank} \(pid \d+ on .+\) is dead")
    assert time.monotonic() - start < 60  # 30 after the kill, and as long to start


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_with_all_stacks(tmp_path: Path) -> None:
    fault = "hooks.fault_injection={at: 3, rank: 1, kind: sleep}"
    done = train(tmp_path, "run", TWO, fault, "launch.hang_timeout_s=8")
    check_failed(done, tmp_path / "run", 1, "nothing has moved")
    assert "time.sleep(self.seconds)" in done.stdout
    assert "all_gather" in done.stdout
    assert done.stdout.count("stack of rank") == 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named(tmp_path: Path, rank: int) -> None:
    """Rank 0 keeps the board: the others must not wait for its answer."""
    fault = f"hooks.fault_injection={{at: 3, rank: {rank}, kind: stop}}"
    done = train(tmp_path, "run", TWO, fault, "launch.hang_timeout_s=20")
    cause = r"has not answered for 20 s" if rank == 0 else "nothing has moved"
    check_failed(done, tmp_path / "run", rank, cause)
    assert "RUN FAILED" in (tmp_path / "run/log.txt").read_text().splitlines()[-1]


@pytest.mark.slow
def test_a_killed_rank_is_started_again(tmp_path: Path) -> None:
    fault = "hooks.fault_injection={at: 9, rank: 1, kind: kill}"
    done = train(tmp_path, "run", TWO, fault, "launch.max_restarts=1", "train.checkpoint_every=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 1 of 1" in done.stdout
    spared = "hooks.fault_injection={at: 999, rank: 1, kind: kill}"
    assert train(tmp_path, "whole", TWO, spared).returncode == 0
    assert tiny.rows(tmp_path / "run") == tiny.rows(tmp_path / "whole")
    states = [tiny.last_state(tmp_path / name) for name in ("run", "whole")]
    assert tiny.differences(*states) == []


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Two ranks of ``folder/run`` that have done a few steps."""
    out = folder / "run"
    process = subprocess.Popen(
        [sys.executable, *words(folder, "run", TWO, *more)],
        env=tiny.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len(tiny.rows(out)) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    return process


@pytest.mark.slow
def test_ranks_that_are_suspended_together_go_on(tmp_path: Path) -> None:
    """As ``scontrol suspend`` does: nobody hangs, and nobody is taken for hanging."""
    process = start(tmp_path, "train.epochs=4000", "launch.hang_timeout_s=20")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    for number, pause in ((signal.SIGSTOP, 25), (signal.SIGCONT, 4)):
        for pid in children:
            os.kill(int(pid), number)
        time.sleep(pause)
    process.send_signal(signal.SIGTERM)
    lines = process.communicate(timeout=60)[0].splitlines()
    assert lines[-1].startswith("RUN interrupted by SIGTERM"), lines


@pytest.mark.slow
def test_a_signal_stops_all_ranks_at_one_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(tmp_path, "train.epochs=400")
    process.send_signal(signal.SIGTERM)
    lines = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 128 + signal.SIGTERM, lines
    assert lines[-1].startswith("RUN interrupted by SIGTERM")
    step = tiny.status(out)["step"]
    assert (out / f"checkpoints/step_{step:09d}.pt").exists()
    done = train(tmp_path, "run", TWO, "train.epochs=400", f"train.stop_at={step + 2}")
    assert done.returncode == 75
    assert f"resumed from {out}/checkpoints/step_{step:09d}.pt" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's death")
def test_ranks_whose_parent_is_killed_save_and_leave(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, *words(tmp_path, "run", TWO, "train.epochs=4000")]
    with subprocess.Popen(
        command, env=tiny.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "step 2 " not in process.stdout.readline():
            assert process.poll() is None
        process.kill()
        lines = process.stdout.readlines()  # until the ranks, whose output it is, too, have left
    assert lines[-1].startswith("RUN interrupted by SIGTERM at step ")
    assert tiny.status(out)["state"] == "interrupted"
    assert orphans(str(out)) == []


@pytest.mark.slow
def test_every_launcher_gives_the_same_losses(tmp_path: Path) -> None:
    launchers = {
        "python": ((), ()),
        "selftask": ((), (TWO,)),
        "torchrun1": (("-m", "torch.distributed.run", "--nproc_per_node=1"), ()),
        "torchrun2": (("-m", "torch.distributed.run", "--nproc_per_node=2"), ()),
    }
    losses = {}
    for name, (launcher, more) in launchers.items():
        more = (*more, "train.max_steps=5")  # MAE: nothing in it looks at the whole batch
        done = train(tmp_path, name, *more, launcher=launcher, method="mae")
        assert done.returncode == 0, done.stdout + done.stderr
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(row)["loss"] for row in rows]
    for name, actual in losses.items():
        assert actual == pytest.approx(losses["python"], rel=1e-6), name
        assert len(actual) == 5
