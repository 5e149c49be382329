"""Images that say which they are, and batches of them."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import numpy as np
import torch

from selftask.batch import Batch
from selftask.config.schema import Component, ViewConfig
from selftask.data.loading.dataset import ViewDataset
from selftask.data.loading.loader import Batches
from selftask.data.views import Views
from selftask.errors import BadImage

CROP = Component(name="random_resized_crop", args={"size": 8})


class Numbers:
    """n plain images, image i of gray level i; those in ``bad`` cannot be read."""

    labels = None

    def __init__(self, n: int, bad: tuple[int, ...] = (), dies_at: int = -1) -> None:
        self.n, self.bad, self.dies_at = n, bad, dies_at

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.bad:
            raise BadImage(self.path(index), "broken")
        return np.full((9, 9, 3), index, dtype=np.uint8), index % 3

    def path(self, index: int) -> str:
        return f"images/{index}"


def dataset(source: Any, seed: int = 0) -> ViewDataset:
    views = Views({"main": ViewConfig(count=2, transforms=[CROP])})
    return ViewDataset(source, views, seed)


def read(batches: Batches, count: int, start: int = 0) -> list[Batch]:
    batches.start(start)
    samples = list(itertools.islice(batches, count))
    batches.close()
    return samples


def assert_same(a: list[Batch], b: list[Batch]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.epoch, x.number) == (y.epoch, y.number)
        assert torch.equal(x.index, y.index)
        assert torch.equal(x.labels, y.labels)
        assert all(torch.equal(v, w) for v, w in zip(x.all_views, y.all_views, strict=True))
