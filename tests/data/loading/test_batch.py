"""Views lie in the batch as if each had been made alone and copied there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numbered import CROP, Numbers

from selftask.config.schema import Component, ViewConfig
from selftask.data import kernel
from selftask.data.loading.collate import BatchBuffer
from selftask.data.loading.dataset import Dataset, EvalDataset, ViewDataset
from selftask.data.loading.workers import BatchReader
from selftask.data.transforms.pipeline import build_pipeline
from selftask.data.views import Views

JITTER = Component(name="color_jitter", args={"brightness": 0.5, "hue": 0.1})
NOISE = Component(name="gaussian_noise", args={"p": 1.0})
VIEWS = {
    "jitter": ViewConfig(count=2, transforms=[CROP, JITTER]),
    "crop": ViewConfig(transforms=[CROP]),
    "not_the_kernel": ViewConfig(transforms=[CROP, NOISE]),
    "as_it_is": ViewConfig(transforms=[]),
}


class Textures(Numbers):
    """Images no two views of which look alike."""

    channels = 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        _, target = super().__getitem__(index)
        shape = (12, 11, self.channels)
        return np.random.default_rng(index).integers(0, 256, shape, dtype=np.uint8), target


class Bands(Textures):
    """With channels that the kernel does not know."""

    channels = 2


KEYS = [[(0, 3), (0, 1), (0, 8), (0, 0)], [(1, 2), (1, 5), (1, 3), (1, 9)], [(1, 7), (1, 6)]]


def copied(data: Dataset, keys: list[tuple[int, int]]) -> list[np.ndarray]:
    """The views of each image that is shown, made alone and stacked."""
    shown = [sample.views for sample in (data[key] for key in keys) if sample.views]
    return [np.stack(pictures) for pictures in zip(*shown, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", [Textures(10), Textures(10, bad=(1, 3, 5)), Bands(10)])
@pytest.mark.parametrize("evaluates", [False, True])
def test_batches_are_what_copies_make(workers: int, source: Any, evaluates: bool) -> None:
    group = {name: view for name, view in VIEWS.items() if source.channels == 3 or name != "jitter"}
    data: Dataset = ViewDataset(source, Views(group, source.channels), 0)
    if evaluates:
        data = EvalDataset(source, build_pipeline([CROP], channels=source.channels))
    reader = BatchReader(data, KEYS, workers, torch.device("cpu"))
    batches = [[view.numpy().copy() for view in batch.views] for batch in reader]
    reader.close()
    assert len(batches) == len(KEYS)
    for views, keys in zip(batches, KEYS, strict=True):
        expected = copied(data, keys)
        assert len(views) == len(data.to_float)
        assert all(np.array_equal(a, b) for a, b in zip(views, expected, strict=True))


def test_only_what_the_kernel_ends_with_lies_in_the_batch() -> None:
    data: Any = ViewDataset(Textures(10), Views(VIEWS), 0)  # type: ignore[arg-type]
    places = BatchBuffer(2)
    assert places.next == []
    places.add(data.sample((0, 1), places.next).views)
    views = data.sample((0, 2), places.next).views
    there = [view is place for view, place in zip(views, places.next, strict=True)]
    compiled = kernel.available()
    assert there == [compiled, compiled, compiled, False, False]
    places.add(views)
    assert places.next == []
    assert all(np.array_equal(a[1], b) for a, b in zip(places.views, views, strict=True))


def test_a_picture_of_another_shape_lies_elsewhere() -> None:
    crop = build_pipeline([CROP])
    image, rng = Textures(1)[0][0], np.random.default_rng
    place = np.zeros((8, 9, 3), np.uint8)
    assert np.array_equal(crop(image, rng(0), place), crop(image, rng(0)))
    assert not place.any()
