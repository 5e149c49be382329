"""The device of this process, and what it can do."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import torch

from selftask.distributed.world import World
from selftask.errors import UserError

_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")  # of Intel, of both, of ARM


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


_KEPT = 1 << 30  # bytes of free memory at the end of the heap


_LARGEST = 32 << 20  # bytes of a kept piece: as far as glibc's own threshold would grow


_SETTINGS = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")


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
