"""Who this process is: rank, world size, device, seeds. Read once, from what the launcher set."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from selftask.errors import UserError


@dataclass(frozen=True)
class World:
    """The process's place: ``rank`` of ``size``, ``local_rank`` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def read_world() -> World:
    """The world as torchrun (RANK, WORLD_SIZE, LOCAL_RANK) describes it; alone without them.

    Raises UserError naming the variables when only some of them are set.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    present = [name for name in names if name in os.environ]
    if not present:
        return World()
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}: "
            "start with torchrun, or unset them for a single process"
        )
    rank, size, local_rank = (int(os.environ[name]) for name in names)
    return World(rank, size, local_rank)


def join_world(world: World, device: torch.device, *, timeout_s: float = 600.0) -> None:
    """Initialise the process group, for more than one process only."""
    if world.size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout_s)
        )


def leave_world() -> None:
    """Destroy the process group if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def pick_device(name: str, world: World) -> torch.device:
    """``auto`` is this rank's GPU where there is one, else the CPU.

    Raises UserError where ``cuda`` is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UserError("train.device=cuda: torch sees no GPU; use train.device=cpu or auto")
        torch.cuda.set_device(world.local_rank)
        return torch.device("cuda", world.local_rank)
    return torch.device(name)


def seed_all(seed: int, rank: int) -> None:
    """Seed python, numpy and torch; ranks draw differently from the same seed."""
    mixed = (seed * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process, as plain tensors and python scalars."""
    version, key, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    state = {
        "python": {"version": version, "key": list(key), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put every generator back where ``rng_state`` found it."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["key"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def describe() -> dict[str, Any]:
    """What ``environment.json`` records: versions, machine, command."""
    import importlib.metadata as metadata
    import platform

    packages = ("torch", "torchvision", "classy-vision", "fvcore", "iopath", "timm", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": versions,
        "command": sys.argv,
    }
