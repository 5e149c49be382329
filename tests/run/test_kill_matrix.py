"""Kill a run anywhere, again and again, and start it by the same command: nothing tells.

Real processes, SIGKILL. Five kills a run: half-way through the first checkpoint's file; from
outside, at some step; twice in the second epoch (in the middle of a step, and between the
checkpoint's rename and its seal); at the end of that epoch, before its checkpoint or after it.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tiny
from selftask.checkpoint import rotation
from selftask.registry import METHODS

pytestmark = pytest.mark.slow

# In the run's own folder, as a user's extension: kills its process, and records what it saw.
KILLER = '''
import json, os, signal, zlib
from dataclasses import dataclass
from pathlib import Path
import torch
from selftask.hooks.base import Hook
from selftask.registry import register_hook

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class HalfWritten:
    def __init__(self, file): self.file, self.length = file, 0
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, block):
        self.length += len(block)
        if self.length > 20_000:
            self.file.write(bytes(block)[: len(block) // 2])
            self.file.file.flush()
            die()
        return self.file.write(block)

@register_hook("recorder")
@dataclass(eq=False, kw_only=True)
class Recorder(Hook):
    priority = 1

    def on_forward(self, task):
        if not task.train:
            return
        batch = task.last_batch
        views = zlib.crc32(b"".join(view.numpy().tobytes() for view in batch.all_views))
        row = {"batch": batch.number, "index": batch.index.tolist(), "views": views}
        with open(task.out / "samples.jsonl", "a") as file:
            file.write(json.dumps(row) + "\\n")

@register_hook("killer")
@dataclass(eq=False, kw_only=True)
class Killer(Hook):
    """Takes the first of the instants in OUT/kills.json off the list, and dies at it."""

    priority = 85

    def on_start(self, task):
        path = task.out / "kills.json"
        instants = json.loads(path.read_text()) if path.exists() else []
        self.where, self.step = instants[0] if instants else ("", 0)
        path.write_text(json.dumps(instants[1:]))
        save, replace = torch.save, os.replace
        def half_save(state, file, *rest):
            save(state, HalfWritten(file) if self.now("half", task) else file, *rest)
        def replace_and_die(old, new):
            replace(old, new)
            if str(new).endswith(".pt") and self.now("unsealed", task):
                die()
        torch.save, os.replace = half_save, replace_and_die

    def now(self, where, task):
        return self.where == where and task.steps_done >= self.step

    def on_backward(self, task):
        if self.now("backward", task):
            die()

    def on_step(self, task):
        if self.now("step", task):
            die()

    def on_phase_end(self, task):
        if self.now("phase_end", task):
            die()

@register_hook("late_killer")
@dataclass(eq=False, kw_only=True)
class LateKiller(Killer):
    """The same after the checkpoint of a phase's end."""
    priority = 99
    def on_start(self, task):
        self.where, self.step = "", 0
    def on_phase_end(self, task):
        early = task.named_hooks["killer"]
        if early.now("phase_saved", task):
            die()
'''
HOOKS = ("import=[killer]", "hooks={recorder: {}, killer: {}, late_killer: {}}")
EVERY = "train.checkpoint_every='2 steps'"


def kills(num_workers: int) -> list[tuple[str, int]]:
    """Where, and after how many steps, the processes die; ``outside`` is done from here."""
    at_the_end = "phase_end" if num_workers else "phase_saved"
    return [("half", 2), ("outside", 3), ("backward", 6), ("unsealed", 8), (at_the_end, 10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    (folder / "killer.py").write_text(KILLER)
    tiny.digits_file(folder)
    tiny.digits_file(folder, "val.npz", 400, 430)
    return folder


def extras(method: str, folder: Path) -> list[str]:
    """A test phase in one method, evaluations in another."""
    val = f"data.val={folder / 'val.npz'}"
    return {
        "supervised": [val, "meters.accuracy={topk: [1]}"],
        "simclr": [val, "eval.evaluations={knn: {}}", "eval.every='1 epoch'"],
        "moco": ["train.step=accumulate", "train.accumulate=2", "train.epochs=5"],
    }.get(method, [])


def words(method: str, folder: Path, out: str, *more: str) -> list[str]:
    return tiny.command(method, folder, out, *HOOKS, EVERY, *extras(method, folder), *more)


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=tiny.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    """Until a row of that step is in ``metrics.jsonl``."""
    path = out / "metrics.jsonl"
    while process.poll() is None:
        seen = tiny.read_metrics(path) if path.exists() else []
        if any(row["step"] >= step for row in seen):
            return
        time.sleep(0.002)
    raise AssertionError(f"ended before step {step}:\n{process.communicate()[0]}")


def whole_run(command: list[str], out: Path) -> None:
    done = tiny.run(command, out.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def killed_run(command: list[str], out: Path, num_workers: int) -> None:
    """Five kills, each process started by the same command; then to the end."""
    out.mkdir()
    folder, chance = out.parent, random.Random(out.name)
    for where, step in kills(num_workers):
        (out / "kills.json").write_text(json.dumps([(where, step)]))
        process = start(command, folder)
        if where == "outside":
            wait_for_step(process, out, step)
            time.sleep(chance.uniform(0, 0.03))
            process.kill()
        output = process.communicate(timeout=300)[0]
        assert process.returncode == -signal.SIGKILL, f"{where}:\n{output}"
        assert tiny.status(out)["state"] == "running"
    done = tiny.run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("RUN finished: ")


def samples(out: Path) -> dict[int, dict[str, Any]]:
    """What each batch was; one that was read again after a kill must be the same again."""
    seen: dict[int, dict[str, Any]] = {}
    for line in (out / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert seen.setdefault(row["batch"], row) == row
    return seen


@pytest.mark.proof
@pytest.mark.parametrize("method", METHODS.names())
def test_five_kills_leave_no_trace(method: str, folder: Path) -> None:
    whole = folder / f"{method}_whole"
    killed = {workers: folder / f"{method}_killed_{workers}" for workers in (3, 0)}
    runs = [(whole_run, words(method, folder, whole.name), whole)]
    for workers, out in killed.items():
        command = words(method, folder, out.name, f"data.num_workers={workers}")
        runs.append((killed_run, command, out, workers))
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(*run) for run in runs]:
            future.result()
    steps = [row["step"] for row in tiny.rows(whole) if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 15
    for out in killed.values():
        assert tiny.rows(out) == tiny.rows(whole)
        assert samples(out) == samples(whole)
        assert tiny.differences(tiny.last_state(out), tiny.last_state(whole)) == []
        assert not list((out / "checkpoints").glob(".*")), "left over by a kill"
        exported = [(path / "export/backbone.pt").read_bytes() for path in (out, whole)]
        assert zlib.crc32(exported[0]) == zlib.crc32(exported[1])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_signals_save_at_the_next_step(name: str, folder: Path) -> None:
    number = getattr(signal, name)
    out = folder / f"signal_{name}"
    command = words("byol", folder, out.name, "data.num_workers=1", "train.epochs=40")
    process = start(command, folder)
    wait_for_step(process, out, 4)
    process.send_signal(number)
    lines = process.communicate(timeout=100)[0].splitlines()
    assert process.returncode == 128 + number
    status = tiny.status(out)
    assert (status["state"], status["by"]) == ("interrupted", name)
    assert lines[-1].startswith(f"RUN interrupted by {name} at step {status['step']}; checkpoint ")
    assert (out / f"checkpoints/step_{status['step']:09d}.pt").exists()
    assert [row["step"] for row in tiny.rows(out)] == list(range(1, status["step"] + 1))

    stop = status["step"] + 3
    more = tiny.run([*command, f"train.stop_at={stop}"], folder)
    assert more.returncode == 75
    assert "train.stop_at" in more.stdout.splitlines()[-1]
    other = folder / f"signal_whole_{name}"
    never = words("byol", folder, other.name, "train.epochs=40", f"train.stop_at={stop}")
    assert tiny.run(never, folder).returncode == 75
    assert tiny.rows(out) == tiny.rows(other)
    assert tiny.differences(tiny.last_state(out), tiny.last_state(other)) == []


# The tests have selftask installed: None in sys.modules makes any import of it fail.
READ = """
import sys
sys.modules["selftask"] = None
import torch
for path in sys.argv[1:]:
    state = torch.load(path, weights_only=True)
    assert {"model", "method", "optimizer", "clock", "rng", "config"} <= set(state), path
print("read", len(sys.argv) - 1)
"""


def test_checkpoints_load_without_selftask(tmp_path: Path) -> None:
    """Those of every method are plain tensors and numbers: tests/methods/test_contract.py."""
    tiny.train("moco", tmp_path, "run", "train.max_steps=2")
    paths = [str(path) for path in rotation.checkpoints(tmp_path / "run/checkpoints")]
    (tmp_path / "read.py").write_text(READ)
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "read.py", *paths],
        cwd=tmp_path,
        env={**tiny.environment(), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"read {len(paths)}\n", done.stderr
