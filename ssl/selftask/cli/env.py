"""``selftask env``: show installed versions, devices and supported features."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selftask import __version__
from selftask.cli.options import take_options
from selftask.config.values.auto_values import cores
from selftask.data import kernel
from selftask.errors import UserError

USAGE = """usage: selftask env [--collectives]

Prints versions, devices and supported features; include it in bug reports.
--collectives   also exchanges tensors between all GPUs (NCCL), or two processes (gloo); fails if a
                result is wrong or an exchange hangs"""

REQUIRED = (
    *("torch", "torchvision", "classy-vision", "fvcore", "iopath", "hydra-core", "omegaconf"),
    *("scikit-learn", "timm", "rich", "safetensors", "submitit"),
)


def main(argv: list[str]) -> int:
    """Print versions, devices and supported features; with ``--collectives``, test collectives."""
    words, options = take_options(argv, {"--collectives": bool})
    if words:
        raise UserError(f"env takes no arguments, got {' '.join(words)!r}\n{USAGE}")
    for topic, value in report():
        print(f"{topic:<16} {value}")
    if options.get("--collectives"):
        from selftask.equivalence.self_test import check_collectives

        print(f"{'self-test':<16} {check_collectives()}")
    return 0


def report() -> Iterator[tuple[str, str]]:
    """Yield pairs of topic and text; missing packages and devices are reported, not raised."""
    yield "selftask", f"{__version__} ({Path(__file__).resolve().parents[1]})"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "cores", f"{cores()} usable of {os.cpu_count()}"
    yield "kernel", kernel.absence() or f"compiled, for {kernel.variants()[0]}"
    for name in REQUIRED:
        yield name, installed_version(name) or "MISSING, and required"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        yield "devices", f"unknown: torch cannot be imported: {error}"
    else:
        yield from _devices(torch)
    yield "slurm", shutil.which("sbatch") or "no sbatch here"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(torch: Any) -> Iterator[tuple[str, str]]:
    cuda = torch.cuda.is_available()
    for index in range(torch.cuda.device_count() if cuda else 0):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
    if not cuda:
        built = (
            f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
        )
        yield "cuda", f"no device ({built})"
    yield "precision", ", ".join(_precisions(torch, cuda))
    backends = ("nccl", "gloo", "mpi")
    distributed = torch.distributed
    usable = distributed.is_available() and [
        name for name in backends if getattr(distributed, f"is_{name}_available")()
    ]
    yield "collectives", ", ".join(usable or ["none"])


def _precisions(torch: Any, cuda: bool) -> Iterator[str]:
    """Yield the values of ``train.precision`` that the GPU, or else the CPU, supports."""
    yield "float32"
    if not cuda:
        from selftask.distributed.device import bfloat16_instructions

        instructions = bfloat16_instructions()
        yield f"bfloat16 ({instructions})" if instructions else "bfloat16"
        return
    if torch.cuda.is_bf16_supported():
        yield "bfloat16"
    yield "float16"
