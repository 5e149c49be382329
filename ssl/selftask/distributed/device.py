"""Device selection, precision checks and CPU memory settings."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import torch

from selftask.distributed.world import World
from selftask.errors import UserError

_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")  # Intel; Intel and AMD; ARM


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


_KEPT = 1 << 30  # trim threshold: bytes of free memory kept at the end of the heap


_LARGEST = 32 << 20  # bytes of a kept block: the maximum of glibc's dynamic mmap threshold


_SETTINGS = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")


def pick_device(name: str, world: World) -> torch.device:
    """Return the device of this rank.

    Args:
        name: ``auto`` (a GPU if available, else the CPU), ``cuda``, ``cpu`` or a torch device.
        world: This process; its local rank selects the GPU.

    Raises:
        UserError: If ``name`` is ``cuda`` and torch finds no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UserError("train.device=cuda: torch sees no GPU; use train.device=cpu or auto")
        index = world.local_rank % torch.cuda.device_count()  # a SLURM task may see one GPU only
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise UserError for float16 on a CPU: it is hardly faster there, and its range is small."""
    if precision == "float16" and device.type == "cpu":
        raise UserError(
            "train.precision='float16' needs a GPU, and this run is on a CPU; use 'bfloat16'"
        )


def bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the fastest bfloat16 matrix instruction set of this CPU, or None.

    Always None on systems other than Linux.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return next((name for name in _BFLOAT16 if name in found), None)


def keep_freed_memory(device: torch.device) -> None:
    """Make glibc reuse the memory of freed tensors in this process and its forks.

    By default glibc returns large blocks to the kernel. Each step then page-faults its activations
    in again, at about 2 us per 4 KiB.

    This function does nothing in three cases: on a GPU, since activations are not on the host; if
    the C library is not glibc; and if the user has set MALLOC_*_ or GLIBC_TUNABLES.

    Blocks over 32 MiB are still returned. torch aligns its blocks, so glibc cannot always reuse a
    freed one of that size, and the heap would grow.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = any(
        f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables
        for name in _SETTINGS
    )
    if device.type != "cpu" or chosen or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt  # without effect if another malloc is preloaded
    mallopt(_M_TRIM_THRESHOLD, _KEPT)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)
