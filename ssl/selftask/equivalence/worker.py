"""One process of a check: its rank's part of every run, and what it says if it fails."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from selftask.config.compose.provenance import show_path
from selftask.config.extensions import import_entry_points, import_extensions
from selftask.config.schema import Config
from selftask.equivalence.trace import RecordedTask, batch_norm_replaced
from selftask.errors import UserError

TIMEOUT_S = 60.0  # for a collective
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC", "SLURM_", "MASTER")


@dataclass(frozen=True)
class Leg:
    """A part of a run: ``size`` ranks go on in the folder ``out`` until ``stop`` steps are done.

    ``name`` is that of its records: ``NAME.RANK.pt``.
    """

    name: str
    size: int
    out: str
    stop: int
    save: bool = False


def work(process: int, legs: list[Leg], config: Config, folder: Path) -> None:
    """What one process does: its rank's part of each leg. Its exit code is 1 if it failed.

    ``failure.PROCESS.json`` then says why.
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
    except BaseException as error:  # noqa: BLE001 - told to the process that waits for this one
        told = {"time": time.time(), "rank": process, "size": leg.size, **_describe(error)}
        (folder / f"failure.{process}.json").write_text(json.dumps(told), encoding="utf-8")
        os._exit(1)  # at once: whoever waits for this rank in a collective then hears of it


def _describe(error: BaseException) -> dict[str, Any]:
    """The message, and the last line of the user's own code in the traceback, or of any."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).resolve().parents[1])
    installed = ("site-packages", "dist-packages", str(Path(traceback.__file__).parent), "<frozen")
    own = [f for f in frames if not any(part in f.filename for part in (ours, *installed))]
    last = (own or list(frames))[-1]
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return {
        "message": message,
        "is_user_error": isinstance(error, UserError),
        "frame": f"{show_path(Path(last.filename))}:{last.lineno} in {last.name}: {last.line}",
    }


@contextmanager
def _rank(rank: int, leg: Leg, folder: Path) -> Iterator[None]:
    """The environment and the process group of one rank; none for one alone."""
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    if leg.size == 1:
        yield
        return
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(leg.size)}
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(leg.size), **local})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # asked for, never used
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
    """Wait for the other ranks, which may have legs of their own to end, however long it takes.

    Whoever has started this process ends it if one of them fails.
    """
    (folder / f"{leg.name}.{rank}.here").touch()
    while not all((folder / f"{leg.name}.{other}.here").exists() for other in range(leg.size)):
        time.sleep(0.01)


def _run(leg: Leg, config: Config, folder: Path) -> dict[str, Any]:
    """Train up to ``leg.stop``; what was recorded."""
    config = replace(config, out=str(folder / leg.out))
    with batch_norm_replaced(config.parallel.sync_batch_norm == "none") as replaced:
        task = RecordedTask(config)
        task.prepare()
    try:
        task.train_until(leg.stop)
        if leg.save:
            task.save_checkpoint()
        record = task.record()
    finally:
        task.close()
    return {**record, "replaced_norms": len(replaced), "loss_reduction": task.loss.loss_reduction}
