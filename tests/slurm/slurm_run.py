"""A run that is submitted to the cluster of the tests, watched from outside."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from selftask.logs import read_metrics
from selftask.slurm.plan import plan

STEPS = 15
PACE = '''
"""Slows a run down, by as many seconds a step as the file OUT/pace says just now."""
import time
from dataclasses import dataclass
from selftask.hooks.base import Hook
from selftask.registry import register_hook

@register_hook("pace")
@dataclass(eq=False, kw_only=True)
class Pace(Hook):
    def on_update(self, task):
        try:
            seconds = float((task.out / "pace").read_text() or 0)
        except FileNotFoundError:
            return
        while seconds > 0 and (task.out / "pace").exists():
            time.sleep(0.1)
            seconds -= 0.1
'''


class Run:
    """A submitted run, watched from outside."""

    def __init__(
        self, folder: Path, name: str, *more: str, pace: float = 0.0, recipe: str = "simclr/digits"
    ) -> None:
        self.out = folder / name
        shutil.rmtree(self.out, ignore_errors=True)  # there if the test is tried once more
        self.out.mkdir()
        if pace:
            (self.out / "pace").write_text(str(pace))
        words = tiny.overrides("simclr", folder, name, *SETTINGS, *more)
        if any(word.startswith("data=") for word in more):
            words.remove(f"data={tiny.digits_file(folder)}")
        self.job = plan(recipe, words).submit()[0]

    @property
    def state(self) -> str:
        return str(tiny.status(self.out)["state"]) if (self.out / "status.json").exists() else ""

    @property
    def log(self) -> str:
        path = self.out / "log.txt"
        return path.read_text() if path.exists() else ""

    @property
    def last_line(self) -> str:
        return self.log.strip().splitlines()[-1]

    @property
    def step(self) -> int:
        path = self.out / "metrics.jsonl"
        rows = read_metrics(path) if path.exists() else []
        return max((row["step"] for row in rows), default=0)

    def at_full_speed(self) -> None:
        (self.out / "pace").unlink(missing_ok=True)

    def slurm(self, key: str) -> str:
        """What the controller says of the job."""
        text = command("scontrol", "show", "job", "--oneliner", self.job.job_id)
        return dict(re.findall(r"(?:^| )(\w+)=(\S*)", text))[key]

    def processes(self) -> dict[int, int]:
        """Pids of everything that runs for this job, and the rank (-1: the batch script)."""
        results = {}
        for entry in Path("/proc").iterdir():
            try:
                variables = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
                if f"SLURM_JOB_ID={self.job.job_id}\0".encode() in variables:
                    rank = re.search(rb"SLURM_PROCID=(\d+)", variables)
                    of_srun = b"SLURM_STEP_ID=" in variables  # the batch script is rank 0, too
                    results[int(entry.name)] = int(rank[1]) if rank and of_srun else -1
            except OSError:  # gone meanwhile
                continue
        return results

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to every process of a rank."""
        pids = [pid for pid, its in self.processes().items() if its == rank]
        assert pids
        for pid in pids:
            os.kill(pid, number)

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: self.step >= step, 60, f"step {step}")

    def wait_for_attempt(self, restarts: int, seconds: float = 240) -> None:
        """Until SLURM has started the job so many times again."""
        wait_for(
            lambda: int(self.slurm("Restarts")) >= restarts and self.slurm("JobState") == "RUNNING",
            seconds,
            f"restart {restarts}",
        )

    def wait_for_end(self, state: str = "finished", seconds: float = 240) -> None:
        """Until the run says so and the job has left nothing behind."""
        last = ("finished", "failed", "interrupted")
        wait_for(lambda: self.state in (state, *last), seconds, f"the run to be {state}")
        assert self.state == state, self.log
        wait_for(
            lambda: self.slurm("JobState") not in ("RUNNING", "COMPLETING", "PENDING"), 30, "end"
        )
        wait_for(lambda: not self.processes(), 15, f"no orphans, not {self.processes()}")


SETTINGS = (
    "import=[pace]",
    "hooks.pace={}",
    "train.checkpoint_every='2 steps'",
    "launch.nodes=2",
    "launch.slurm.exclusive=true",
    "launch.slurm.time=10",
)


def wait_for(true: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def ends_like(run: Run, undisturbed: dict[str, Any]) -> None:
    """Bit for bit, with every step in the metrics once."""
    assert tiny.differences(tiny.last_state(run.out), undisturbed) == []
    steps = [row["step"] for row in read_metrics(run.out / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert "RUN finished" in run.last_line
    assert run.job.results() == [str(run.out)] * 2
