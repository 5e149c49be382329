"""Device selection, precision checks and CPU memory settings."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from selftask.distributed.accelerator import available
from selftask.distributed.world import World
from selftask.errors import UserError, plural

_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")  # Intel; Intel and AMD; ARM
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_KEPT = 1 << 30  # trim threshold: bytes of free memory kept at the end of the heap
_LARGEST = 32 << 20  # bytes of a kept block: the maximum of glibc's dynamic mmap threshold
_SETTINGS = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")


def pick_device(name: str, world: World) -> torch.device:
    """Return the device of this rank; an accelerator also becomes torch's current device.

    Args:
        name: ``auto`` (the accelerator that torch sees, else the CPU), ``cpu`` or the type of an
            accelerator: ``cuda``, ``mps``, ``xpu``.
        world: This process; its local rank selects the accelerator.

    Raises:
        UserError: If torch sees no accelerator of that type, or if ranks would share a GPU.
    """
    seen = available()
    if name == "cpu" or (name == "auto" and seen is None):
        return torch.device("cpu")
    if seen is None or name not in ("auto", seen.type):
        accelerator, others = (
            ("no accelerator", "") if seen is None else (seen.type, f", {seen.type}")
        )
        raise UserError(
            f"train.device={name}: torch sees {accelerator} here; use "
            f"train.device=auto{others} or cpu"
        )
    _check_gpus(seen.type, world)
    index = world.local_rank % torch.accelerator.device_count()  # a SLURM task may see only one
    torch.accelerator.set_device_index(index)
    return torch.device(seen.type, index)


def _check_gpus(kind: str, world: World) -> None:
    """Raise UserError if ranks would share a GPU; NCCL's own error is less clear.

    selftask and torchrun show all GPUs to every process. Other launchers may show each process only
    its own GPU, so one visible GPU is then no error.
    """
    count = torch.accelerator.device_count()
    shown_alike = world.launcher in ("selftask", "torchrun") and "LOCAL_WORLD_SIZE" in os.environ
    if kind == "cuda" and world.local_size > count and (shown_alike or count > 1):
        launch = {"selftask": "launch.processes=", "torchrun": "torchrun --nproc_per_node="}
        option = launch.get(world.launcher, "")
        raise UserError(
            f"{option}{world.local_size}{'' if option else ' ranks'}: torch sees {count} "
            f"{plural('GPU', count)} on this machine, and each rank needs one; use "
            f"{option or 'at most '}{count}, or train.device=cpu"
        )


def auto_precision(device: torch.device) -> tuple[Literal["float32", "bfloat16"], str]:
    """Return the value of ``train.precision=auto`` on a device, and a text that explains it.

    On a CPU it also depends on the network; see ``settle_precision``.
    """
    if device.type != "cuda":
        return "float32", f"auto: float32 on {device.type}"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16", "auto: native on this GPU; train.precision=float32 for more bits"
    return "float32", "auto: this GPU has no native bfloat16"


def precision_advice(precision: str, device: torch.device) -> str | None:
    """Return a log message if another precision suits this device better, or None."""
    if device.type == "cuda":
        return _advice_on_cuda(precision)
    if device.type != "cpu":
        return None
    if precision == "float16":
        return "float16 is slow on a CPU, and its range is small; bfloat16 needs no loss scaling"
    instructions = bfloat16_instructions()
    if precision != "float32" or instructions is None:
        return None
    return (
        f"float32; this CPU has {instructions}, by which train.precision=bfloat16 took 0.5 to 0.9 "
        "times the CPU time (docs/benchmarks.md)"
    )


def _advice_on_cuda(precision: str) -> str | None:
    is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "float32":
        better = "bfloat16" if is_native else "float16"
        return f"float32; train.precision={better} uses this GPU's fast units for matrix products"
    if precision == "bfloat16" and not is_native:
        return "bfloat16 is emulated on this GPU; train.precision=float16 uses its fast units"
    return None


@cache
def computes_in_bfloat16() -> bool:
    """Return True if this CPU has AMX or AVX512-BF16, which speed up bfloat16 matrix products.

    ARM's bfloat16 instructions do not count, since they were not measured.
    """
    return bfloat16_instructions() in ("amx_bf16", "avx512_bf16")


def bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the fastest bfloat16 instructions of this CPU, such as ``amx_bf16``, or None.

    They are read from the file ``cpuinfo``, so the result is None on systems other than Linux.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    instructions = next(
        (line for line in lines if line.startswith(("flags", "Features"))), ""
    ).split()
    return next((name for name in _BFLOAT16 if name in instructions), None)


def keep_freed_memory(device: torch.device) -> None:
    """Make glibc reuse the memory of freed tensors in this process and its forks.

    By default glibc returns large blocks to the kernel. Each step then page-faults its activations
    in again, at about 2 us per 4 KiB.

    This function does nothing in three cases: if ``device`` is not a CPU, since activations are not
    on the host; if the C library is not glibc; and if the user has set a limit by MALLOC_*_ or
    GLIBC_TUNABLES.

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
