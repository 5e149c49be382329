"""Run a function on several gloo ranks of this machine, for tests of distributed claims."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks are forked from a process that has imported what takes time, once for all tests.
_PRELOADED = ["torch.distributed", "torch._dynamo", "torchvision", "timm", "lightly.loss"]
_PRELOADED += ["pytest", "tiny", "selftask.cli.check", "selftask.equivalence.trace"]
multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What ``function(rank, *args)``, defined at module level, returns on each rank.

    An exception on any rank is raised here, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = (function, world_size, folder, args)
        mp.start_processes(_one_rank, work, nprocs=world_size, start_method="forkserver")
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def _one_rank(
    rank: int, function: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
