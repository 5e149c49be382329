"""Process-wide settings of torch's arithmetic: precision, algorithms, threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
import yaml
from torch import nn

from selftask.config.schema import Config, TrainConfig
from selftask.config.values.auto_values import cores, cores_of_ranks
from selftask.distributed.collectives import gather_objects, world_size
from selftask.distributed.device import auto_precision, computes_in_bfloat16
from selftask.distributed.world import World
from selftask.errors import UserError
from selftask.hooks.base import Task
from selftask.models.build import build_on_meta
from selftask.models.precision.bfloat16 import gains_from_bfloat16
from selftask.task.task_state import resumes

LOW_PRECISION = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FULL_PRECISION: AbstractContextManager[None] = nullcontext()


def settle_precision(
    config: Config, device: torch.device, backbone: nn.Module | None = None
) -> Config:
    """Return the config with ``train.precision=auto`` replaced by the value for ``device``.

    The reason is recorded in ``config.places``. A run that resumes keeps the precision in the
    ``config.yaml`` of its folder, and ``train.step=manual`` always uses float32. On a CPU the value
    depends on its instructions and the widths of the backbone, not on a measurement, so that two
    runs of one recipe agree.

    Args:
        config: Config of the run.
        device: Device of the training.
        backbone: The backbone, if it is not the one of ``config.backbone``.
    """
    if config.train.precision != "auto":
        return config
    precision: str
    precision, reason = auto_precision(device)
    if config.train.step.name == "manual":
        precision, reason = "float32", "auto: train.step=manual has no mixed precision"
    elif recorded := _recorded_precision(config):
        precision, reason = recorded, "auto: as the run begun in this folder"
    elif device.type == "cpu" and computes_in_bfloat16():
        precision, reason = _precision_on_cpu(config, backbone)
    return with_precision(config, precision, reason)


def with_precision(config: Config, precision: Any, origin: str) -> Config:
    """Return a copy of the config with a value of ``train.precision``, and its origin."""
    return replace(
        config,
        train=replace(config.train, precision=precision),
        places={**config.places, "train.precision": origin},
    )


def is_settled(config: Config) -> bool:
    """Return whether ``train.precision`` was ``auto`` and has been replaced by a value."""
    return config.place("train.precision").startswith("auto: ")


def agree_on_precision(task: Task) -> None:
    """Replace the value of ``train.precision=auto`` by that of rank 0, on every rank.

    CPUs of several machines may differ in their instructions. Every rank must call this function.
    """
    if world_size() == 1:
        return
    config = task.config
    first = gather_objects(config.train.precision)[0]
    if is_settled(config) and first != config.train.precision:
        task.config = with_precision(config, first, "auto: as on rank 0")
        task.low_precision = LOW_PRECISION.get(first)


def _precision_on_cpu(config: Config, backbone: nn.Module | None) -> tuple[str, str]:
    """Return the precision on a CPU that computes in bfloat16, and the reason."""
    if backbone is None:
        # a UserError is raised again when the backbone is built with the channels of the data
        with suppress(UserError), torch.random.fork_rng(devices=[]):
            backbone = build_on_meta(config.backbone, channels=3)
    if backbone is None:
        return "float32", "auto: the widths of this backbone are not known before it is built"
    gains, reason = gains_from_bfloat16(backbone)
    return ("bfloat16" if gains else "float32"), f"auto: {reason}"


def _recorded_precision(config: Config) -> str | None:
    """Return the precision of the run that this one resumes, or None."""
    if not resumes(config):
        return None
    try:
        text = (config.out_folder / "config.yaml").read_text(encoding="utf-8")
        saved = yaml.safe_load(text)
        precision = str(saved["train"]["precision"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        return None  # the check of the folder reports a damaged file
    return precision if precision in ("float32", *LOW_PRECISION) else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return torch's autocast context; without effect if ``dtype`` is None."""
    return FULL_PRECISION if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def numerics(train: TrainConfig, device: torch.device) -> Iterator[None]:
    """Context that applies the process-wide torch settings of ``train`` and restores the old ones.

    cuBLAS reads its workspace setting from the environment when it starts. In a process that has
    already used CUDA, ``train.deterministic`` therefore comes too late, and torch raises an error.
    This environment variable stays set.
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
    """Return whether cuDNN times its algorithms, by default on CUDA unless deterministic."""
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


def num_threads(config: Config, world: World) -> int:
    """Return the number of torch's CPU threads per process.

    On a CPU, ``auto`` leaves a quarter of the process's cores free for the loader, at least one
    unless the process has only one core: making views takes 0.5 to 5 % of the CPU time of training
    (``tools/bench/threads.py``). The value does not depend on the number of workers, since results
    depend on it bit for bit. More threads than free cores are several times slower: threads
    synchronize at every operation, so all of them wait for one that has lost its core to a worker.

    With an accelerator, ``auto`` uses the cores that the workers leave free, at least one.

    Args:
        config: The config of the run.
        world: This process; ranks of one machine share its cores.
    """
    threads = config.train.threads
    if threads != "auto":
        return int(threads)
    share = min(cores(), cores_of_ranks(world) // world.local_size)
    if config.train.device != "cpu" and torch.accelerator.is_available():
        return max(1, share - config.data.num_workers)
    return max(1, share - max(1, share // 4))


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Context in which torch has ``number`` CPU threads; the earlier number is restored on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
