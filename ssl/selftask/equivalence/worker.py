"""Worker process of a check: runs its rank of each leg and records failures."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from selftask.config.extensions.imports import import_entry_points, import_extensions
from selftask.config.extensions.user_code import place_of, user_frames
from selftask.config.schema import Config
from selftask.equivalence.trace import RecordedTask, batch_norm_replaced
from selftask.errors import UserError, message_of, with_advice

TIMEOUT_S = 60.0  # for a collective
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC", "SLURM_", "MASTER")


@dataclass(frozen=True)
class Leg:
    """Part of a run on a fixed number of ranks.

    Args:
        name: Its records are saved as ``NAME.RANK.pt``.
        size: Number of ranks.
        out: Run folder, which may have a checkpoint of an earlier leg.
        stop: Number of steps at its end, counted from the start of the run.
        save: If True, save a checkpoint at its end.
    """

    name: str
    size: int
    out: str
    stop: int
    save: bool = False


def work(process: int, legs: list[Leg], config: Config, folder: Path) -> None:
    """Run one rank of each leg.

    A failure is written to ``failure.PROCESS.json``, and the process exits with code 1.

    Args:
        process: Number of this process, which is its rank in each leg.
        legs: Parts to run in order; those with ``size <= process`` are skipped.
        config: A config made by ``make_tiny``.
        folder: Folder of run folders, records and failures.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    leg = legs[0]
    try:
        import_entry_points()
        import_extensions(config.imports, [], "import")
        for leg in legs:
            if process < leg.size:
                with _rank(process, leg, folder):
                    record = _run(leg, config, folder)
                torch.save(record, folder / f"{leg.name}.{process}.pt")
    except BaseException as error:  # noqa: BLE001 - reported to the parent process
        failure = {"time": time.time(), "rank": process, "size": leg.size, **_describe(error)}
        (folder / f"failure.{process}.json").write_text(json.dumps(failure), encoding="utf-8")
        os._exit(1)  # immediately, so that collectives of the other ranks fail


def _describe(error: BaseException) -> dict[str, Any]:
    """Return the message and the last traceback frame, in the user's own code if possible."""
    last = (user_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
    return {
        "message": with_advice(message_of(error)),
        "is_user_error": isinstance(error, UserError),
        "frame": f"{place_of(last)} in {last.name}: {last.line}",
    }


@contextmanager
def _rank(rank: int, leg: Leg, folder: Path) -> Iterator[None]:
    """Context with the environment and process group of one rank; no group for a single rank."""
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    if leg.size == 1:
        yield
        return
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(leg.size)}
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(leg.size), **local})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # required, but unused
    _meet(rank, leg, folder)
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(folder / f"{leg.name}.rendezvous"), leg.size
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=leg.size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meet(rank: int, leg: Leg, folder: Path) -> None:
    """Wait without a time limit for the other ranks, which may still run an earlier leg.

    The parent ends this process if one of them fails.
    """
    (folder / f"{leg.name}.{rank}.here").touch()
    while not all((folder / f"{leg.name}.{other}.here").exists() for other in range(leg.size)):
        time.sleep(0.01)


def _run(leg: Leg, config: Config, folder: Path) -> dict[str, Any]:
    """Train up to ``leg.stop`` and return the record."""
    config = replace(config, out=str(folder / leg.out))
    is_synced = config.parallel.sync_batch_norm != "none"
    norms: AbstractContextManager[list[str]] = (
        nullcontext([]) if is_synced else batch_norm_replaced()
    )
    with norms as replaced:
        task = RecordedTask(config)
        task.prepare()
    try:
        task.train_until(leg.stop)
        if leg.save:
            task.save_checkpoint()
        record = task.record()
    finally:
        task.close()
    return {
        **record,
        "replaced_norms": len(replaced),
        "loss_reduction": task.loss.loss_reduction,
        "length": asdict(task.length),
    }
