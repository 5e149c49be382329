"""A run that changes its ranks and its way of reduction at every start, by way of shards."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_matrix import COMPARED, differences, make_double

import tiny
from ranks import run_ranks
from selftask.checkpoint import rotation
from selftask.data.loading.open_data import open_data
from selftask.distributed.collectives import rank, world_size
from selftask.distributed.world import World
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

LENGTH = 4
WAYS = ("manual", "ddp")
Leg = tuple[str, str, int]  # name of the run, way of reduction, step to stop after


def train(folder: Path, out: str, way: str, stop_at: int) -> None:
    """Go on in double precision; whoever shards writes shards."""
    torch.set_num_threads(1)
    words = (f"parallel.reduce={way}", "parallel.sync_batch_norm=all")
    config = tiny.config("byol", folder, out, *words, f"train.max_steps={LENGTH}")
    how = replace(
        config.train,
        sharded_checkpoints=way == "fsdp",
        stop_at=stop_at if stop_at < LENGTH else None,
    )
    config = replace(config, train=how)
    task = Task(config, sources=open_data(config.data))
    task.world = World(rank(), world_size(), rank(), world_size())
    start = task.on_start

    def on_start() -> None:
        make_double(task)
        start()

    task.on_start = on_start  # type: ignore[method-assign]
    try:
        train_loop(task)
    except Interrupted:
        assert task.steps_done == stop_at


def on_ranks(_: int, folder: Path, legs: list[Leg]) -> list[str]:
    torch.set_default_dtype(torch.float64)
    results = []
    for leg in legs:
        try:
            train(folder, *leg)
        except Exception:  # noqa: BLE001 - told by the parent
            results.append(f"{leg}: {traceback.format_exc()}")
    return results


def two(folder: Path, *legs: Leg) -> None:
    results = run_ranks(on_ranks, 2, folder, list(legs))
    assert results == [[], []], "\n".join(text for texts in results for text in texts)


@pytest.fixture
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("_double")
def test_shards_are_taken_up_by_whatever_comes_next(tmp_path: Path) -> None:
    tiny.digits_file(tmp_path)
    two(tmp_path, ("whole", "manual", LENGTH), *[(way, "fsdp", 1) for way in WAYS])
    for way in WAYS:
        train(tmp_path, way, way, 2)
    two(tmp_path, *[leg for way in WAYS for leg in ((way, "fsdp", 3), (way, way, LENGTH))])
    expected = tiny.last_state(tmp_path / "whole")
    for way in WAYS:
        paths = rotation.checkpoints(tmp_path / way / "checkpoints")
        assert [path.suffix for path in paths] == [".pt", "", ".pt"], "of 4, the newest 3 are kept"
        actual = tiny.last_state(tmp_path / way)
        for key in COMPARED:
            assert differences(expected[key], actual[key], key) == [], way
        rows = [[row.get("loss") for row in tiny.rows(tmp_path / out)] for out in ("whole", way)]
        assert rows[1] == pytest.approx(rows[0], rel=1e-9), way
