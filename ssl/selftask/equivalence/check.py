"""Do W ranks with B / W samples each do what one rank with B samples does?

``check`` trains a recipe's small version on every number of ranks that is asked for and compares
what they saw, their losses, gradients and all their state with those of one rank; then again while
the number of ranks changes from 2 to 1 and back between checkpoints.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from selftask.config.schema import Config
from selftask.equivalence.compare import Record, Row, compare, compare_resume, merge
from selftask.equivalence.worker import Leg, work
from selftask.errors import RunError, UserError, describe_exit
from selftask.registry import BACKBONES

_PRELOADED = ("selftask.equivalence.worker", "torch._dynamo")  # optimizers import the second: 3 s
_GRACE_S = 5.0  # for ranks that fail because another one has


@dataclass(frozen=True)
class Report:
    """What a check has found."""

    rows: list[Row]
    replaced_norms: int
    silent: bool  # the loss exchanges nothing between ranks, against the method's declaration

    @property
    def ok(self) -> bool:
        return not self.silent and all(row.ok for row in self.rows)


class RankFailed(RunError):
    """A rank raised, or was killed."""


def check(config: Config, *, ranks: Sequence[int], steps: int) -> Report:
    """Train the small ``config`` for ``steps`` steps on each number of ``ranks``; compare.

    Raises RankFailed with the cause and, for what the user can put right, UserError.
    """
    sizes = sorted({1, *ranks})
    legs = [Leg(f"ranks{size}", size, f"ranks{size}", steps) for size in sizes]
    resumed = _legs_of_a_resume(steps) if steps >= 3 and 2 in sizes else []
    with tempfile.TemporaryDirectory(prefix="selftask-check-") as name:
        folder = Path(name)
        _run_processes(max(sizes), [*legs, *resumed], config, folder)
        runs = {leg.name: _read(folder, leg) for leg in (*legs, *resumed)}
    one = merge(runs["ranks1"])
    rows = [row for leg in legs[1:] for row in compare(one, runs[leg.name], str(leg.size))]
    if resumed:
        rows += compare_resume(merge(runs["ranks2"]), [runs[leg.name] for leg in resumed])
    widest = runs[legs[-1].name][0]
    silent = widest["loss_reduction"] != "samples" and max(sizes) > 1 and widest["exchanges"] == 0
    return Report(rows, runs["ranks1"][0]["replaced_norms"], silent)


def _legs_of_a_resume(steps: int) -> list[Leg]:
    """Two ranks, one, two: a step each, and whatever is left on the last two."""
    return [
        Leg("leg1", 2, "resumed", 1, save=True),
        Leg("leg2", 1, "resumed", 2, save=True),
        Leg("leg3", 2, "resumed", steps),
    ]


# -- processes ---------------------------------------------------------------------------------


def _run_processes(number: int, legs: list[Leg], config: Config, folder: Path) -> None:
    """Every leg on the first processes, which are started once."""
    context = multiprocessing.get_context("forkserver")
    _start_server(config)
    processes = [
        context.Process(target=work, args=(rank, legs, config, folder), daemon=True)
        for rank in range(number)
    ]
    for process in processes:
        process.start()
    try:
        codes = _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [_failure(folder, rank, code) for rank, code in enumerate(codes) if code]
    if failed:
        _raise(sorted(failed, key=lambda failure: failure["time"]))


def _start_server(config: Config) -> None:
    """The process that imports torch once and is forked for every rank; it ends with this one.

    What it has to import it must find by PYTHONPATH: older Pythons do not hand it ``sys.path``.
    """
    library = getattr(BACKBONES[config.backbone.name], "library", None)
    multiprocessing.set_forkserver_preload([*_PRELOADED, *([library] if library else [])])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _wait(processes: Sequence[Any]) -> list[int | None]:
    """Until all have ended well, or some time after one has not; their exit codes."""
    running, until = list(processes), math.inf
    while running and time.monotonic() < until:
        left = None if until == math.inf else until - time.monotonic()
        wait([process.sentinel for process in running], left)
        if any(process.exitcode for process in running):
            until = min(until, time.monotonic() + _GRACE_S)
        running = [process for process in running if process.exitcode is None]
    return [process.exitcode for process in processes]


def _failure(folder: Path, rank: int, code: int) -> dict[str, Any]:
    """What a rank that ended badly has told, or what its exit code tells."""
    told = folder / f"failure.{rank}.json"
    if told.exists():
        content: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
        return content
    return {"time": 0.0, "rank": rank, "size": 0, "message": describe_exit(code), "frame": ""}


def _raise(failures: list[dict[str, Any]]) -> None:
    """Raise the first failure, with what the other ranks said after it."""
    first = failures[0]
    if first.get("is_user_error"):
        raise UserError(first["message"])
    lines = []
    for failure in failures:
        of = f" of {failure['size']}" if failure["size"] else ""
        lines.append(f"rank {failure['rank']}{of}: {failure['message']}")
        if failure["frame"]:
            lines.append(f"  {failure['frame']}")
    raise RankFailed("\n".join(lines))


def _read(folder: Path, leg: Leg) -> list[Record]:
    paths = [folder / f"{leg.name}.{rank}.pt" for rank in range(leg.size)]
    return [torch.load(path, weights_only=True) for path in paths]
