"""Process-wide settings of torch's arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from selftask.config.schema import TrainConfig


@contextmanager
def numerics(train: TrainConfig) -> Iterator[None]:
    """Context that applies the process-wide torch settings of ``train`` and restores the old ones.

    cuBLAS reads its workspace setting from the environment when it starts. In a process that has
    already used CUDA, ``train.deterministic`` therefore comes too late, and torch raises an error.
    """
    cudnn: Any = torch.backends.cudnn
    precision, benchmark = torch.get_float32_matmul_precision(), cudnn.benchmark
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if train.matmul_precision is not None:
            torch.set_float32_matmul_precision(train.matmul_precision)
        if train.cudnn_benchmark:
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
