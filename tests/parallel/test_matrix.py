"""Every method through the real task: methods x crops x ways of reduction x checkpointing.

In double precision and with BatchNorm over all ranks, so that two ranks are one rank.
"""

from __future__ import annotations

import functools
import itertools
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from ranks import run_ranks
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import DEFAULT_HOOKS, Config, ParallelConfig
from selftask.data.loading.open_data import open_data
from selftask.distributed.collectives import rank, world_size
from selftask.distributed.world import World
from selftask.errors import ConfigError
from selftask.registry import METHODS
from selftask.task import Task

STEPS = 3
TOLERANCE = 1e-8  # AdamW divides gradients that are nothing but rounding by their own size
WAYS = ("manual", "ddp", "fsdp")
CHECKPOINTING = ("none", "blocks")
LOCAL = (
    "{count: 2, transforms: [{name: random_resized_crop, size: 16, scale: [0.1, 0.5]}, normalize]}"
)
QUIET = [f"hooks.{name}=null" for name in DEFAULT_HOOKS]
COMPARED = ("model", "method", "optimizer", "clock")


def cases(method: str) -> list[tuple[str, str, str]]:
    """With crops of another size, too, if the method takes more than two views."""
    try:
        load_config(f"{method}/digits", [f"views.local={LOCAL}"])
        choices = ["", f"views.local={LOCAL}"]
    except ConfigError:
        choices = [""]
    return list(itertools.product(choices, WAYS, CHECKPOINTING))


@functools.cache
def small_config(method: str, crops: str, folder: Path) -> Config:
    """The images of all, and a run folder of its own: ``folder``."""
    return tiny.config(method, folder.parent, folder, *QUIET, *filter(None, [crops]))


def run(method: str, crops: str, way: str, checkpointing: str, folder: Path) -> dict[str, Any]:
    """Three steps of the small task in double precision: its state and losses."""
    torch.set_num_threads(1)
    chosen: Any = {"reduce": way, "activation_checkpointing": checkpointing}
    parallel = ParallelConfig(bucket_mb=0.005, sync_batch_norm="all", **chosen)
    config = replace(small_config(method, crops, folder), parallel=parallel)
    task = Task(config, sources=open_data(config.data))
    task.world = World(rank(), world_size(), rank(), world_size())
    task.prepare()
    make_double(task)
    task.on_start()
    task.on_phase_start()
    losses = []
    for _ in range(STEPS):
        task.step()
        losses.append(task.last_batch.loss)
    state = task.state_dict()
    task.close()
    return {"losses": losses, **{key: state[key] for key in COMPARED}}


def make_double(task: Task) -> None:
    """Images are read in single precision."""
    prepare, iterate_all = task.loss.prepare_batch, task.data_module.iterate_all

    def double(batch: Batch) -> Batch:
        batch.views = {n: [view.double() for view in group] for n, group in batch.views.items()}
        return batch

    def prepare_double(batch: Batch, task: Task) -> None:
        prepare(double(batch), task)

    task.loss.prepare_batch = prepare_double  # type: ignore[method-assign]
    task.data_module.iterate_all = lambda: map(double, iterate_all())  # type: ignore[method-assign]


def on_rank(_: int, method: str, folder: Path) -> list[Any]:
    """All cases of a method; the text of the exception for one that fails."""
    torch.set_default_dtype(torch.float64)
    results: list[Any] = []
    for case in cases(method):
        try:
            results.append(run(method, *case, folder / str(rank())))
        except Exception:  # noqa: BLE001 - told by the parent, beside the other cases
            results.append(traceback.format_exc())
    return results


@pytest.fixture
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("method", METHODS.names())
def test_two_ranks_are_one_under_every_reduction(method: str, tmp_path: Path) -> None:
    tiny.digits_file(tmp_path)
    first, _ = run_ranks(on_rank, 2, method, tmp_path)
    expected: dict[str, Any] = {}
    wrong = []
    for case, result in zip(cases(method), first, strict=True):
        crops = case[0]
        if crops not in expected:
            expected[crops] = run(method, crops, "manual", "none", tmp_path / "alone")
        if isinstance(result, str):
            wrong.append(f"{case}: {result}")
        else:
            wrong += [f"{case}: {d}" for d in differences(expected[crops], result)][:3]
    assert wrong == [], "\n".join(wrong)


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two nested states differ by more than rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point():
        if a.shape != b.shape:
            return [f"{place}: {tuple(a.shape)} and {tuple(b.shape)}"]
        error = float((a - b).abs().max()) if a.numel() else 0.0
        return (
            [f"{place}: {error}"]
            if error > TOLERANCE * (1 + float(a.abs().max() if a.numel() else 0))
            else []
        )
    if isinstance(a, dict) and isinstance(b, dict):
        odd = [f"{place}.{key}: on one side only" for key in a.keys() ^ b.keys()]
        return odd + [
            d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{place}.{key}")
        ]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [
            d
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for d in differences(x, y, f"{place}[{i}]")
        ]
    return tiny.differences(a, b, place)
