"""What this process works with: its process group, device, seeds and random states."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import selftask
from selftask.errors import UserError
from selftask.world import World

_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")  # of Intel, of both, of ARM
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT = 1 << 30  # bytes of free memory at the end of the heap
_LARGEST = 32 << 20  # bytes of a kept piece: as far as glibc's own threshold would grow
_SETTINGS = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")


def join_world(world: World, device: torch.device, *, timeout_s: float = 600.0) -> None:
    """Initialise the process group, for more than one process only.

    A collective that takes longer than ``timeout_s`` fails on the ranks that wait in it. Raises
    UserError where the ranks cannot find each other.
    """
    if world.size == 1 or dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    meeting = "env://" if world.master is None else "tcp://{}:{}".format(*world.master)
    try:
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        host, port = meeting_point(world)
        raise UserError(
            f"rank {world.rank} of {world.size} ({world.launcher}) cannot join the others at "
            f"{host}:{port}: {str(error).splitlines()[0]}; if the port is taken, set MASTER_PORT"
        ) from error


def meeting_point(world: World) -> tuple[str, int]:
    """Host and port of rank 0."""
    return world.master or (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


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
        index = world.local_rank % torch.cuda.device_count()  # SLURM may show each task its own
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise UserError for float16 on a CPU, which gains little from it for a small range."""
    if precision == "float16" and device.type == "cpu":
        raise UserError(
            "train.precision='float16' needs a GPU, and this run is on a CPU; use 'bfloat16'"
        )


def bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the CPU's instructions for products in bfloat16, the fastest there, or None.

    Known on Linux only.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return next((name for name in _BFLOAT16 if name in found), None)


def keep_freed_memory(device: torch.device) -> None:
    """Let this process, and those it forks, keep the memory of freed tensors for the next ones.

    glibc gives large pieces back, so that each step gets its activations page by page again, at
    about 2 us for 4 KiB. With a GPU they are not on the host, and batches lie in memory that is
    used again: nothing is kept. Nor where another C library is in use, nor against the user, who
    can set the same by MALLOC_*_ and GLIBC_TUNABLES. Pieces over 32 MiB still go back: aligned as
    torch's are, glibc cannot always use a freed one again, and the heap would grow.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = any(
        f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables
        for name in _SETTINGS
    )
    if device.type != "cpu" or chosen or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt  # heeded by no other malloc that is preloaded
    mallopt(_M_TRIM_THRESHOLD, _KEPT)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)


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


def _commit() -> str | None:
    """The commit of the checkout that selftask runs from, or that pip installed; None if unknown.

    ``-dirty`` follows if files of a checkout have been changed since.
    """
    try:
        direct = importlib.metadata.distribution("selftask").read_text("direct_url.json")
        installed = json.loads(direct or "{}").get("vcs_info", {}).get("commit_id")
        if installed:
            return str(installed)
    except importlib.metadata.PackageNotFoundError:
        pass
    root = Path(selftask.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    words = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def describe() -> dict[str, Any]:
    """What ``environment.json`` records: versions, machine, command."""
    packages = ("torch", "torchvision", "classy-vision", "fvcore", "iopath", "timm", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": versions,
        "selftask": {"version": selftask.__version__, "commit": _commit()},
        "command": sys.argv,
    }
