"""Checks of ``acceptance.py`` on several ranks, and of commands."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tiny
from gpu.agreement import EXACT, difference
from gpu.rows import Result, Setting

STEPS_OF_RANKS = 10
LONGEST_END = 180  # seconds, of which NCCL's watchdog may take a minute
EVALUATIONS = {"knn": "knn_top1", "linear": "linear_top1", "spectrum": "rankme"}
LIMIT_OF_EVALUATIONS = 0.03  # relative: a test image of 80 may be classified otherwise


def check_ranks(setting: Setting) -> Iterator[Result]:
    if setting.ranks < 2:
        yield Result("ranks", "several GPUs", "only one device here")
        return
    expected = _losses_of_ranks(setting, 1, "manual")
    for reduce in ("manual", "ddp", "fsdp"):
        error = difference(_losses_of_ranks(setting, 2, reduce), expected)
        yield Result("ranks", reduce, f"{error:.1e}", "at most 1e-04", error <= 1e-4)
    yield _killed_rank(setting)


def _losses_of_ranks(setting: Setting, processes: int, reduce: str) -> list[float]:
    """Return the losses of the first steps of a run in float32, without TF32."""
    words = (f"launch.processes={processes}", f"parallel.reduce={reduce}")
    out = f"ranks-{reduce}-{processes}"
    more = (
        *words,
        *EXACT,
        "train.precision=float32",
        "parallel.sync_batch_norm=all",
        setting.on_device,
    )
    done = setting.run_command("simclr", setting.folder, out, *more)
    if done.returncode:
        raise RuntimeError(last_line(done.stderr))
    rows = tiny.rows(setting.folder / out)
    return [row["loss"] for row in rows if "loss" in row][:STEPS_OF_RANKS]


def run_command(
    method: str, folder: Path, out: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """Train in processes of their own."""
    return tiny.run(tiny.command(method, folder, out, *more), folder)


def _killed_rank(setting: Setting) -> Result:
    """The other ranks must end with an error, not wait for the killed one."""
    fault = "hooks.fault_injection={at: 3, rank: 1, kind: kill}"
    words = ("launch.processes=2", setting.on_device, fault)
    begun = time.monotonic()
    done = setting.run_command("simclr", setting.folder, "killed", *words)
    seconds = time.monotonic() - begun
    passed = done.returncode != 0 and seconds < LONGEST_END
    expected = f"ends within {LONGEST_END} s with an error"
    return Result("ranks", "killed", f"exit {done.returncode} in {seconds:.0f} s", expected, passed)


def last_line(text: str) -> str:
    """Return the last line of what a process printed."""
    return (text.strip().splitlines() or ["no message"])[-1]


def check_commands(setting: Setting) -> Iterator[Result]:
    """Evaluations of one run on a CPU and on the device; other commands end without an error."""
    folder = setting.folder
    trained = tiny.run(tiny.command("simclr", folder, "trained", setting.on_device), folder)
    if trained.returncode:
        raise RuntimeError(last_line(trained.stderr))
    run, val = folder / "trained", tiny.digits_file(folder, "val.npz", 80, 240)
    for name, metric in EVALUATIONS.items():
        words = ["eval", name, str(run), f"data.val={val}"]
        values = [_printed(words, folder, device)[metric] for device in ("cpu", setting.device)]
        error = abs(values[0] - values[1]) / max(values[0], 1e-12)
        most = f"at most {LIMIT_OF_EVALUATIONS}"
        yield Result(
            "commands", f"eval {name}", f"{error:.1e}", most, error <= LIMIT_OF_EVALUATIONS
        )
    ways = {
        "features": [f"out={folder / 'features'}"],
        "finetune": [f"data={val}", "data.val=null", "train.epochs=1", f"out={folder / 'tuned'}"],
        "export": ["--to", "onnx"],
        "report": [],
    }
    for command, more in ways.items():
        done = _selftask([command, str(run), *more], folder)
        figure = "exit 0" if not done.returncode else last_line(done.stderr)
        yield Result("commands", command, figure, "exit 0", not done.returncode)


def _printed(words: list[str], folder: Path, device: str) -> dict[str, float]:
    """Return the JSON line that an evaluation prints last."""
    done = _selftask([*words, f"train.device={'cpu' if device == 'cpu' else 'auto'}"], folder)
    if done.returncode:
        raise RuntimeError(last_line(done.stderr))
    printed: dict[str, float] = json.loads(last_line(done.stdout))
    return printed


def _selftask(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return tiny.run([sys.executable, "-m", "selftask", *words], folder)
