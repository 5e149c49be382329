"""Check that W ranks with B / W samples each are equivalent to one rank with B samples.

``check`` trains the tiny version of a recipe on each requested number of ranks. It compares
samples, inputs, losses, gradients and the final state with those of one rank. If 2 is one of the
numbers and there are enough steps, it trains once more while the number of ranks changes from 2 to
1 and back between checkpoints.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from selftask.config.run_length import RunLength
from selftask.config.schema import Config
from selftask.equivalence.compare import Record, Row, compare, compare_resume, merge
from selftask.equivalence.durations import not_reached
from selftask.equivalence.on_ranks import run_processes
from selftask.equivalence.worker import Leg, work
from selftask.errors import RunError, UserError, describe_exit
from selftask.registry import BACKBONES

_PRELOADED = ("selftask.equivalence.worker", "torch._dynamo")  # torch._dynamo takes 3 s
_GRACE_S = 5.0  # for ranks that fail after the first failure


@dataclass(frozen=True)
class Report:
    """Result of a check."""

    rows: list[Row]
    replaced_norms: int  # number of BatchNorm layers replaced by ``batch_norm_replaced``
    silent: bool  # the loss calls no collective, although the method declares that it does
    draws: list[str] = field(default_factory=list)  # global random generators that a step uses
    not_reached: list[str] = field(default_factory=list)  # what the method does after these steps

    @property
    def ok(self) -> bool:
        return not self.silent and all(row.ok for row in self.rows)


def check(config: Config, *, ranks: Sequence[int], steps: int) -> Report:
    """Train the tiny ``config`` on each number of ranks, and compare the runs.

    Args:
        config: A config made by ``make_tiny``.
        ranks: Numbers of ranks; 1 is always included.
        steps: Number of steps of each training.

    Returns:
        A report with the difference of each quantity from that of one rank, see ``Row``. A resume
        on another number of ranks is included if ``ranks`` contains 2 and ``steps`` is at least 3.

    Raises:
        UserError: If a rank failed with an error that the user must fix.
        RunError: If a rank failed with another exception or was killed.
    """
    sizes = sorted({1, *ranks})
    legs = [Leg(f"ranks{size}", size, f"ranks{size}", steps) for size in sizes]
    resumed = _legs_of_a_resume(steps) if steps >= 3 and 2 in sizes else []
    with tempfile.TemporaryDirectory(prefix="selftask-check-") as name:
        folder = Path(name)
        _run_legs(max(sizes), [*legs, *resumed], config, folder)
        runs = {leg.name: _read(folder, leg) for leg in (*legs, *resumed)}
    one = merge(runs["ranks1"])
    rows = [row for leg in legs[1:] for row in compare(one, runs[leg.name], str(leg.size))]
    if resumed:
        rows += compare_resume(merge(runs["ranks2"]), [runs[leg.name] for leg in resumed])
    widest = runs[legs[-1].name][0]
    silent = widest["loss_reduction"] != "samples" and max(sizes) > 1 and widest["exchanges"] == 0
    records = [record for run in runs.values() for record in run]
    draws = sorted({name for record in records for name in record["draws"]})
    length = RunLength(**records[0]["length"])
    later = [*not_reached(config, steps, length), *_steps_compared(records, steps, length)]
    return Report(rows, runs["ranks1"][0]["replaced_norms"], silent, draws, later)


def _steps_compared(records: Sequence[Record], steps: int, length: RunLength) -> list[str]:
    """Describe each comparison of ``task.steps_done`` with a step that the check has not reached.

    Comparisons with the last step of the run are left out.
    """
    asked = {line: step for record in records for line, step in record["asked"].items()}
    return [
        f"step {step}, which {line} compares with (--steps {step + 1})"
        for line, step in asked.items()
        if step >= steps and step != length.total_steps
    ]


def _legs_of_a_resume(steps: int) -> list[Leg]:
    """Return legs on 2, 1 and 2 ranks: one step in each of the first two, the rest in the last."""
    return [
        Leg("leg1", 2, "resumed", 1, save=True),
        Leg("leg2", 1, "resumed", 2, save=True),
        Leg("leg3", 2, "resumed", steps),
    ]


# -- processes ---------------------------------------------------------------------------------


def _run_legs(number: int, legs: list[Leg], config: Config, folder: Path) -> None:
    """Run all legs on ``number`` processes; a leg of W ranks uses the first W of them."""
    context = multiprocessing.get_context("forkserver")
    _start_server(config)
    processes = [
        context.Process(target=work, args=(rank, legs, config, folder), daemon=True)
        for rank in range(number)
    ]
    codes = run_processes(processes, grace_s=_GRACE_S)
    failed = [_failure(folder, rank, code) for rank, code in enumerate(codes) if code]
    if failed:
        _raise(sorted(failed, key=lambda failure: failure["time"]))


def _start_server(config: Config) -> None:
    """Start the server process, which imports torch once and is forked for every rank.

    PYTHONPATH is set, since older versions of Python do not pass ``sys.path`` to the server.
    """
    library = getattr(BACKBONES[config.backbone.name], "library", None)
    multiprocessing.set_forkserver_preload([*_PRELOADED, *([library] if library else [])])
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _failure(folder: Path, rank: int, code: int) -> dict[str, Any]:
    """Return the failure that a rank has written, or one made from its exit code."""
    file = folder / f"failure.{rank}.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    return {"time": 0.0, "rank": rank, "size": 0, "message": describe_exit(code), "frame": ""}


def _raise(failures: list[dict[str, Any]]) -> None:
    """Raise UserError if the first failure is one, otherwise RunError with all messages."""
    first = failures[0]
    if first.get("is_user_error"):
        raise UserError(first["message"])
    lines = []
    for failure in failures:
        of = f" of {failure['size']}" if failure["size"] else ""
        lines.append(f"rank {failure['rank']}{of}: {failure['message']}")
        if failure["frame"]:
            lines.append(f"  {failure['frame']}")
    raise RunError("\n".join(lines))


def _read(folder: Path, leg: Leg) -> list[Record]:
    paths = [folder / f"{leg.name}.{rank}.pt" for rank in range(leg.size)]
    return [torch.load(path, weights_only=True) for path in paths]
