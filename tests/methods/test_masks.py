"""The masks of MAE and I-JEPA where a batch shows an image several times: each showing has its own.

What names them is the loader's key, so that they depend neither on workers nor ranks nor resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import open_data
from selftask.distributed.world import World
from selftask.task import Task

TIMES = 4
REPEATED = f"data.sampler={{name: repeated, times: {TIMES}}}"
STEPS = tiny.STEPS_PER_EPOCH + 2  # into the second epoch


def read(
    task: Task, *, num_workers: int = 0, start: int = 0, world: World | None = None
) -> list[list[Tensor]]:
    """Index and masks of each batch from ``start`` on, as the method gets and makes them."""
    data = replace(task.config.data, num_workers=num_workers)
    config, sources = replace(task.config, data=data), open_data(task.config.data)
    feed = DataModule(config, sources, world or task.world, task.device)
    try:
        batches = list(islice(feed.train_batches(start), STEPS - start))
    finally:
        feed.close()
    for batch in batches:
        task.loss.prepare_batch(batch, task)
    return [[batch.index, *tensors(batch.input[1:])] for batch in batches]


def tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
        return
    for item in nested or ():  # None: no padding
        yield from tensors(item)


def assert_equal(actual: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("method", ["ijepa", "mae"])
def test_each_showing_of_an_image_has_a_mask_of_its_own(method: str, tmp_path: Path) -> None:
    task = tiny.task(method, tmp_path, "run", REPEATED)
    task.prepare()
    whole = read(task)
    for index, *masks in whole:
        assert index.unique(return_counts=True)[1].tolist() == [TIMES] * (len(index) // TIMES)
        rows = torch.cat([mask.flatten(1) for mask in masks], dim=1)  # (B, all places)
        assert len(rows.unique(dim=0)) == len(rows)
    assert not torch.equal(whole[0][1], whole[tiny.STEPS_PER_EPOCH][1])
    for workers in (1, 4):
        assert_equal(read(task, num_workers=workers), whole)
    assert_equal(read(task, start=3), whole[3:])
    ranks = [read(task, world=World(rank, 2, rank, 2)) for rank in (0, 1)]
    both = [
        [torch.cat(pair) for pair in zip(*batch, strict=True)] for batch in zip(*ranks, strict=True)
    ]
    assert_equal(both, whole)
    task.close()
