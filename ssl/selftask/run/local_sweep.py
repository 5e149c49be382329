"""Sweeps on this machine, with one or several runs at a time.

Each run is a process of ``selftask train`` with its own folder below ``out``. The parent process
never imports torch. The same command resumes a sweep: runs that are not finished continue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from selftask.config.compose.sweep import Point, load_points
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.config.values.auto_values import cores
from selftask.distributed.world import STOP_SIGNALS, is_ignored, read_world
from selftask.errors import UserError
from selftask.files.addresses import is_remote
from selftask.logs import announce
from selftask.report.overview.run_line import read_line
from selftask.report.overview.table import columns_of, text_table
from selftask.run.local_ranks import end_with, is_from_terminal, own_command


@dataclass
class Run:
    """One run of a sweep."""

    name: str
    out: Path
    command: list[str]
    processes: int  # its ranks
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)


def train_sweep(recipe: str, points: Sequence[Point]) -> int:
    """Train all runs of a sweep, then print a table of them.

    Args:
        recipe: Name or path of the recipe.
        points: The runs.

    Returns:
        0 if all runs are finished, else the exit code of the first run that is not.

    Raises:
        UserError: If a config is invalid, before any run starts.
    """
    if read_world().launcher != "python":
        raise UserError("command line: a sweep starts its own processes; give one value a key")
    configs = _read(recipe, points)
    at_once = min(configs[0].launch.parallel_runs, len(points))
    base = Path(configs[0].out)
    runs = [
        Run(
            point.name,
            base / point.name,
            own_command([recipe, *point.overrides, *_own(base / point.name, config, at_once)]),
            config.launch.processes,
        )
        for point, config in zip(points, configs, strict=True)
    ]
    announce(f"sweep: {len(runs)} runs in {base}, {at_once} at a time")
    code = Sweep(runs, at_once).wait()
    print("\n".join(_table(runs)), flush=True)
    return code


def _read(recipe: str, points: Sequence[Point]) -> list[Config]:
    """Return the config of each run; raise ConfigError with the problems of all runs."""
    configs = load_points(points, lambda point: load_config(recipe, point.overrides))
    if is_remote(configs[0].out):
        raise UserError(f"out={configs[0].out}: the runs of a sweep need a local folder")
    return configs


def _own(out: Path, config: Config, at_once: int) -> list[str]:
    """Return the overrides that give a run its folder and its share of the cores."""
    words = [f"out={out}"]
    if at_once > 1 and config.train.threads == "auto":
        words.append(f"train.threads={max(1, cores() // at_once)}")
    return words


class Sweep:
    """Runner of a sweep: starts runs in order, at most ``at_once`` at a time.

    If runs are trained one at a time, they print to this terminal. Otherwise their output is only
    in ``log.txt``, and each has its own GPUs, as far as there are enough. A stop signal is
    forwarded to the active runs, and no other runs are started.
    """

    def __init__(self, runs: Sequence[Run], at_once: int) -> None:
        self.runs, self.at_once = runs, at_once
        self.slots: list[Run | None] = [None] * at_once  # the active runs
        self.stopped = False

    def wait(self) -> int:
        """Train all runs; return 0, or the exit code of the first run that is not finished."""
        heeded = [n for n in STOP_SIGNALS if n != signal.SIGHUP or not is_ignored(n)]
        before = {number: signal.signal(number, self._pass_on) for number in heeded}
        waiting = list(self.runs)
        codes: dict[str, int] = {}
        try:
            while any(self.slots) or (waiting and not self.stopped):
                for slot, run in enumerate(self.slots):
                    if run is None and waiting and not self.stopped:
                        self.slots[slot] = self._start(waiting.pop(0), slot)
                    elif run is not None and _poll(run) is not None:
                        self.slots[slot] = None
                        codes[run.name] = _exit_code(run)
                        self._report(run)
                time.sleep(0.05)
        finally:
            for run in filter(None, self.slots):
                assert run.process is not None
                run.process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        failed = [codes.get(run.name, 128 + signal.SIGTERM) for run in self.runs]
        return next((code for code in failed if code), 0)

    def _start(self, run: Run, slot: int) -> Run:
        run.out.mkdir(parents=True, exist_ok=True)
        quiet: Any = subprocess.DEVNULL if self.at_once > 1 else None
        gpus = _share(_visible_gpus(), slot, run.processes) if self.at_once > 1 else ()
        announce(f"sweep: {run.name} starts")
        run.process = subprocess.Popen(
            run.command,
            stdout=quiet,
            stderr=quiet,
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with(),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None,
        )
        return run

    def _report(self, run: Run) -> None:
        if self.at_once > 1:
            announce(f"sweep: {run.name}: {_last_line(run)}")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if is_from_terminal(number):  # to the runs as well
            return
        for run in self.runs:
            if run.process is not None and run.process.poll() is None:
                with suppress(ProcessLookupError):
                    run.process.send_signal(number)


def _visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu.strip()]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _share(gpus: Sequence[str], slot: int, processes: int) -> Sequence[str]:
    """Return the GPUs of the run in a slot: one a process, different ones in different slots."""
    shares = max(1, len(gpus) // processes)
    first = slot % shares * processes
    return gpus[first : first + processes] if shares > 1 else gpus


def _poll(run: Run) -> int | None:
    return run.process.poll() if run.process is not None else None


def _exit_code(run: Run) -> int:
    code = _poll(run) or 0
    return 128 - code if code < 0 else code


def _last_line(run: Run) -> str:
    log = run.out / "log.txt"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return lines[-1] if lines else f"exit code {_exit_code(run)}, and no log"


def _table(runs: Sequence[Run]) -> list[str]:
    """Return the table of ``selftask runs``, without the columns that change after the end."""
    lines = [read_line(run.out) for run in runs]
    columns = [name for name in columns_of(lines) if name not in ("age", "eta")]
    return text_table(lines, columns)
