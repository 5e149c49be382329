"""Run a function on several ranks of this machine, for tests of your own code.

::

    def mean_rank(rank):
        return float(all_reduce_mean(torch.tensor(float(rank))))

    def test_mean():
        assert on_ranks(mean_rank, 2) == [0.5, 0.5]
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from selftask.errors import RunError, describe_exit

_START_S = 120.0  # longest time in which processes start and import torch


def on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str = "gloo",
) -> list[Any]:
    """Return the results of ``function(rank, *args)`` on each rank of a new process group.

    Args:
        function: Function at module level; ranks are new processes, which import it.
        world_size: Number of ranks.
        *args: Other arguments, which can be pickled.
        timeout_s: Longest time that a rank may take, in seconds.
        backend: Backend of ``torch.distributed``; with ``nccl`` rank r uses GPU r.

    Raises:
        RunError: With the tracebacks, if a rank raises an exception, hangs or dies.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = (world_size, folder, function, args, timeout_s, backend)
        ranks = [context.Process(target=_run, args=(rank, *work)) for rank in range(world_size)]
        codes = run_processes(ranks, limit_s=_START_S + timeout_s)
        problems = [
            f"rank {rank} of {world_size} {problem}"
            for rank, code in enumerate(codes)
            if (problem := _problem(folder / f"{rank}.txt", code, timeout_s))
        ]
        if None in codes and not problems:
            problems = [f"the ranks did not end within {_START_S + timeout_s:g} s"]
        if problems:
            raise RunError("\n".join(problems))
        paths = [folder / f"{rank}.pt" for rank in range(world_size)]
        return [torch.load(path, weights_only=False) for path in paths]  # of our own processes


def run_processes(
    processes: Sequence[Any], *, limit_s: float = math.inf, grace_s: float = 0.0
) -> list[int | None]:
    """Start processes and wait; return their exit codes, None for one stopped by a limit.

    Args:
        processes: Processes of ``multiprocessing`` that have not been started.
        limit_s: Time after which running processes are killed, in seconds.
        grace_s: Time after the first failure in which the others may end, in seconds.
    """
    for process in processes:
        process.start()
    until = time.monotonic() + limit_s
    try:
        running = list(processes)
        while running and (remaining := until - time.monotonic()) > 0:
            wait([p.sentinel for p in running], None if remaining == math.inf else remaining)
            running = [process for process in running if process.exitcode is None]
            if any(process.exitcode for process in processes):
                until = min(until, time.monotonic() + grace_s)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _problem(written: Path, code: int | None, timeout_s: float) -> str:
    """Return how a rank failed; an empty string if it finished or still runs (None)."""
    text = written.read_text(encoding="utf-8") if written.exists() else ""
    if text.startswith("Timeout"):
        return f"hung for {timeout_s:g} s:\n{text.partition(chr(10))[2]}"
    if text:
        return f"raised an exception:\n{text}"
    return describe_exit(code) if code else ""


def _run(
    rank: int,
    world_size: int,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    backend: str,
) -> None:
    """Run the function as one rank; write its result, traceback or the stack at which it hangs."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    with (folder / f"{rank}.txt").open("w", encoding="utf-8") as report:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=report)
        try:
            store = f"file://{folder}/rendezvous"
            dist.init_process_group(backend, store, rank=rank, world_size=world_size)
            torch.save(function(rank, *args), folder / f"{rank}.pt")
            dist.destroy_process_group()
        except Exception:  # noqa: BLE001 - of the user's function; the parent raises it
            report.write(traceback.format_exc())
            report.flush()
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
