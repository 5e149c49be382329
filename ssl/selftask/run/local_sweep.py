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
from dataclasses import dataclass
from pathlib import Path

from selftask.config.compose.sweep import Point, load_points
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.config.values.auto_values import cores
from selftask.distributed.world import read_world
from selftask.errors import UserError
from selftask.files.addresses import is_remote
from selftask.logs import announce
from selftask.logs.tails import last_line
from selftask.report.overview.run_line import read_line
from selftask.report.overview.table import columns_of, text_table
from selftask.run.local_ranks import Children, own_command, shell_code


@dataclass
class Run:
    """One run of a sweep."""

    name: str
    out: Path
    command: list[str]
    processes: int  # its ranks


def train_sweep(recipe: str, points: Sequence[Point]) -> int:
    """Train all runs of a sweep, then print a table of them.

    Args:
        recipe: Name or path of the recipe.
        points: Name and overrides of each run.

    Returns:
        0 if all runs are finished, else the exit code of the first run that is not.

    Raises:
        UserError: If a config is invalid, ``out`` is remote, or a launcher has started this
            process. No run has started then.
    """
    if read_world().launcher != "python":
        raise UserError("command line: a sweep starts its own processes; give one value a key")
    configs = _read_configs(recipe, points)
    at_once = min(configs[0].launch.parallel_runs, len(points))
    base = Path(configs[0].out)
    runs = []
    for point, config in zip(points, configs, strict=True):
        out = base / point.name
        words = [*point.overrides, *_own_overrides(out, config, at_once)]
        runs.append(Run(point.name, out, own_command([recipe, *words]), config.launch.processes))
    announce(f"sweep: {len(runs)} runs in {base}, {at_once} at a time")
    code = Sweep(runs, at_once).wait()
    print("\n".join(_table(runs)), flush=True)
    return code


def _read_configs(recipe: str, points: Sequence[Point]) -> list[Config]:
    """Return the config of each run; raise UserError with the problems of all runs."""
    configs = load_points(points, lambda point: load_config(recipe, point.overrides))
    if is_remote(configs[0].out):
        raise UserError(f"out={configs[0].out}: the runs of a sweep need a local folder")
    return configs


def _own_overrides(out: Path, config: Config, at_once: int) -> list[str]:
    """Return the overrides that give a run its folder and its share of the cores."""
    words = [f"out={out}"]
    if at_once > 1 and config.train.threads == "auto":
        words.append(f"train.threads={max(1, cores() // at_once)}")
    return words


class Sweep(Children):
    """Runner of a sweep: starts runs in order, at most ``at_once`` at a time.

    If runs are trained one at a time, they print to this terminal. Otherwise their output is only
    in ``log.txt``, and each has its own GPUs, as far as there are enough. A stop signal is
    forwarded to the active runs, and no other runs are started.
    """

    def __init__(self, runs: Sequence[Run], at_once: int) -> None:
        super().__init__()
        self.runs, self.at_once = runs, at_once

    def wait(self) -> int:
        """Train all runs; return 0, or the exit code of the first run that is not finished."""
        running: dict[int, int] = {}  # slot -> index of its run and of the run's process
        try:
            while running or self._has_next():
                for slot in range(self.at_once):
                    if slot not in running and self._has_next():
                        running[slot] = len(self.processes)
                        self._start_next(slot)
                    elif slot in running and self.processes[running[slot]].poll() is not None:
                        self._report(running.pop(slot))
                time.sleep(0.05)
        finally:
            self.end()
        codes = [shell_code(process.returncode) for process in self.processes]
        if len(codes) < len(self.runs):  # stopped
            codes.append(128 + signal.SIGTERM)
        return next(filter(None, codes), 0)

    def _has_next(self) -> bool:
        """Return whether there is another run to start."""
        return self.stopped_by is None and len(self.processes) < len(self.runs)

    def _start_next(self, slot: int) -> None:
        run = self.runs[len(self.processes)]
        run.out.mkdir(parents=True, exist_ok=True)
        announce(f"sweep: {run.name} starts")
        quiet = subprocess.DEVNULL if self.at_once > 1 else None
        gpus = _share(_visible_gpus(), slot, run.processes) if self.at_once > 1 else ()
        chosen = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None
        self.start(run.command, [chosen], stdout=quiet, stderr=quiet, stdin=subprocess.DEVNULL)

    def _report(self, index: int) -> None:
        """Print the last log line of a run that has ended, if runs do not print to the terminal."""
        if self.at_once > 1:
            run, code = self.runs[index], shell_code(self.processes[index].returncode)
            last = last_line(run.out / "log.txt") or f"exit code {code}, and no log"
            announce(f"sweep: {run.name}: {last}")


def _visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu.strip()]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _share(gpus: Sequence[str], slot: int, processes: int) -> Sequence[str]:
    """Return the GPUs of a slot's run, one per process; all GPUs if too few for two runs."""
    shares = max(1, len(gpus) // processes)
    first = slot % shares * processes
    return gpus[first : first + processes] if shares > 1 else gpus


def _table(runs: Sequence[Run]) -> list[str]:
    """Return the table of ``selftask runs``, without the columns that change after the end."""
    lines = [read_line(run.out) for run in runs]
    columns = [name for name in columns_of(lines) if name not in ("age", "eta")]
    return text_table(lines, columns)
