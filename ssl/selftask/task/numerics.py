"""Process-wide settings of torch's arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from selftask.config.schema import Config, TrainConfig
from selftask.distributed.device import auto_precision

LOW_PRECISION = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FULL_PRECISION: AbstractContextManager[None] = nullcontext()


def settle_precision(config: Config, device: torch.device) -> Config:
    """Replace ``train.precision=auto`` by its value on ``device``; the origin explains it."""
    if config.train.precision != "auto":
        return config
    precision, origin = auto_precision(device)
    if config.train.step.name == "manual":
        precision, origin = "float32", "auto: train.step=manual has no mixed precision"
    return replace(
        config,
        train=replace(config.train, precision=precision),
        places={**config.places, "train.precision": origin},
    )


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return torch's autocast context; without effect if ``dtype`` is None."""
    return FULL_PRECISION if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def numerics(train: TrainConfig, device: torch.device) -> Iterator[None]:
    """Context that applies the process-wide torch settings of ``train`` and restores the old ones.

    cuBLAS reads its workspace setting from the environment when it starts. In a process that has
    already used CUDA, ``train.deterministic`` therefore comes too late, and torch raises an error.
    """
    cudnn: Any = torch.backends.cudnn
    precision, benchmark = torch.get_float32_matmul_precision(), cudnn.benchmark
    tf32 = cudnn.allow_tf32
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if train.matmul_precision is not None:
            torch.set_float32_matmul_precision(train.matmul_precision)
        if train.cudnn_tf32 is not None:
            cudnn.allow_tf32 = train.cudnn_tf32
        if uses_benchmark(train, device):
            cudnn.benchmark = True
        if train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)  # also sets cuDNN's flag
            cudnn.benchmark = False
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warns)
        cudnn.benchmark = benchmark
        cudnn.allow_tf32 = tf32


def uses_benchmark(train: TrainConfig, device: torch.device) -> bool:
    """Return whether cuDNN times its algorithms; ``auto`` does on CUDA, since shapes repeat."""
    if train.cudnn_benchmark is None:
        return device.type == "cuda" and not train.deterministic
    return train.cudnn_benchmark


def describe_numerics(train: TrainConfig, device: torch.device) -> str | None:
    """Return the settings in effect on a CUDA device, with reasons for defaults; None elsewhere."""
    if device.type != "cuda":
        return None
    products = train.matmul_precision or "highest (default: losses need all bits of float32)"
    tf32 = "off" if train.cudnn_tf32 is False else "on"
    if train.cudnn_tf32 is None:
        tf32 += " (torch's default; train.cudnn_tf32=false for all bits of float32)"
    benchmark = "on" if uses_benchmark(train, device) else "off"
    if train.cudnn_benchmark is None:
        benchmark += " (train.deterministic)" if train.deterministic else " (auto: shapes repeat)"
    return f"products {products}; cuDNN's TF32 {tf32}; cudnn_benchmark {benchmark}"
