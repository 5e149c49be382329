"""The device engine behind the loader: the cpu engine's samples, whatever the workers and stops."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from selftask.batch import Batch
from selftask.config.schema import Component, ViewConfig
from selftask.data.cache.on_device import CachedBatches, free_bytes
from selftask.data.device.batches import DeviceDataset, shrunk
from selftask.data.device.engine import Engine
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.dataset import ViewDataset
from selftask.data.loading.loader import Batches, EvalBatches
from selftask.data.loading.prefetch import Prefetcher
from selftask.data.views import Views
from selftask.errors import BadImage, UserError

LEVEL = 1 / 255  # a gray level in views without normalize


def part(name: str, **args: Any) -> Component:
    return Component(name=name, args=args)


CROPS = [
    part("random_resized_crop", size=12),
    part("horizontal_flip"),
    part("color_jitter", brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, p=0.8),
    part("gaussian_blur"),
]


class Photos:
    """CacheDataset of different sizes; those in ``bad`` cannot be read."""

    labels = None

    def __init__(self, n: int = 30, bad: tuple[int, ...] = (), *, same: bool = False) -> None:
        self.n, self.bad, self.same = n, bad, same

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index in self.bad:
            raise BadImage(self.path(index), "broken")
        y, x = np.mgrid[0:20, 0:24] if self.same else np.mgrid[0 : 18 + index % 5, 0 : 30 - index]
        planes = [np.sin(x / 5 + index), np.cos(y / 4 - index), np.sin((x + y) / 6)]
        return (np.stack(planes, -1) * 127 + 128).astype(np.uint8), index % 3

    def path(self, index: int) -> str:
        return f"photos/{index}"


def by_cpu(source: Any) -> ViewDataset:
    return ViewDataset(source, Views(config(CROPS)), 3)


def config(transforms: list[Component], count: int = 2) -> dict[str, ViewConfig]:
    return {"main": ViewConfig(count=count, transforms=transforms)}


def dataset(
    source: Any, transforms: list[Component] = CROPS, max_side: int | None = None
) -> DeviceDataset:
    views = Views(config(transforms))
    return DeviceDataset(source, views, 3, Engine(views, config(transforms)), max_side)


def read(batches: Batches, count: int, start: int = 0) -> list[Batch]:
    batches.start(start)
    samples = list(itertools.islice(batches, count))
    batches.close()
    return samples


def assert_same(a: list[Batch], b: list[Batch], levels: float | None = None) -> None:
    """Equal, or the views within a mean of so many gray levels."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.epoch, x.number) == (y.epoch, y.number)
        assert torch.equal(x.index, y.index)
        assert torch.equal(x.labels, y.labels)
        for one, other in zip(x.all_views, y.all_views, strict=True):
            difference = (one - other).abs()
            assert one.shape == other.shape
            assert difference.mean() <= (levels or 0) * LEVEL
            assert levels is not None or difference.max() < 1e-5


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_same_samples_as_the_cpu_engine_for_any_workers() -> None:
    expected = read(Batches(by_cpu(Photos()), batch_size=8, seed=3), 7)
    one = read(Batches(dataset(Photos()), batch_size=8, seed=3), 7)
    assert_same(one, expected, levels=1.5)
    for workers in (1, 4):
        again = Batches(dataset(Photos()), batch_size=8, seed=3, num_workers=workers)
        assert_same(read(again, 7), one)


def test_samples_do_not_depend_on_stops_or_ranks() -> None:
    make = lambda **rank: Batches(dataset(Photos()), batch_size=8, seed=3, **rank)  # noqa: E731
    whole = read(make(), 7)
    assert_same(read(make(), 3, start=4), whole[4:])
    halves = [read(make(rank=rank, world_size=2), 7) for rank in (0, 1)]
    for sample, first, second in zip(whole, *halves, strict=True):
        assert torch.equal(sample.index, torch.cat([first.index, second.index]))
        for view, pair in enumerate(zip(first.all_views, second.all_views, strict=True)):
            torch.testing.assert_close(sample.all_views[view], torch.cat(pair), rtol=0, atol=1e-5)


def test_bad_files_are_replaced_as_by_the_cpu_engine() -> None:
    source = Photos(bad=(3, 17))
    bad_files = BadFiles(None, 30, max_unreadable=0.1)
    cpu = Batches(by_cpu(source), batch_size=8, seed=3, bad_files=bad_files)
    ours = BadFiles(None, 30, max_unreadable=0.1)
    device = Batches(dataset(source), batch_size=8, seed=3, bad_files=ours)
    assert_same(read(device, 6), read(cpu, 6), levels=1.5)
    assert ours.reasons == bad_files.reasons
    assert set(ours.reasons) == {"photos/3", "photos/17"}


def test_views_without_a_crop_are_refused() -> None:
    batches = Batches(dataset(Photos(), CROPS[2:]), batch_size=8, seed=3)
    with pytest.raises(UserError, match="ColorJitter comes before any crop"):
        read(batches, 1)


def test_a_pass_over_all_images() -> None:
    """The last batch is smaller; an image that cannot be read is replaced, as in a sweep."""
    data = dataset(Photos(21, bad=(5,)))
    actual = list(EvalBatches(data, batch_size=8, bad_files=BadFiles(None, 21, max_unreadable=1)))
    assert [len(sample.index) for sample in actual] == [8, 8, 5]
    assert all(len(view) == len(sample.index) for sample in actual for view in sample.all_views)


def test_shrunk_pictures() -> None:
    picture = Photos(1)[0][0]
    assert picture.shape == (18, 30, 3)
    assert shrunk(picture, 30) is picture
    small = shrunk(picture, 10)
    assert small.shape == (6, 10, 3)
    assert abs(small.mean() - picture.mean()) < 3
    batches = Batches(dataset(Photos(), max_side=12), batch_size=8, seed=3)
    (sample,) = read(batches, 1)
    assert sample.all_views[0].shape == (8, 3, 12, 12)


def test_one_ahead_gives_each_sample_once_and_errors_in_their_place() -> None:
    made: list[int] = []

    def make() -> Batch:
        if len(made) == 3:
            raise UserError("no more")
        made.append(len(made))
        none = torch.zeros(0)
        return Batch(views={}, labels=none, index=none, key=none, number=made[-1])

    ahead = Prefetcher(make, torch.device("cpu"))
    assert ahead.next().number == 0
    assert made == [0, 1]
    assert [ahead.next().number, ahead.next().number] == [1, 2]
    for _ in range(2):
        with pytest.raises(UserError, match="no more"):
            ahead.next()


def cached(source: Any, transforms: list[Component] = CROPS, **rank: Any) -> CachedBatches:
    data = dataset(source, transforms)
    return CachedBatches(
        data, batch_size=8, seed=3, bad_files=BadFiles(None, 30, max_unreadable=1), **rank
    )


@pytest.mark.parametrize(
    ("source", "transforms"),
    [
        (Photos(), CROPS),
        (Photos(same=True), CROPS),
        (Photos(bad=(3, 17)), CROPS),
    ],
    ids=["ragged", "one size", "bad files"],
)
def test_cached_samples_are_the_same(source: Photos, transforms: list[Component]) -> None:
    bad_files = BadFiles(None, 30, max_unreadable=1)
    uncached = Batches(dataset(source, transforms), batch_size=8, seed=3, bad_files=bad_files)
    expected = read(uncached, 7)
    whole = read(cached(source, transforms), 7)
    assert_same(whole, expected, levels=0.05)
    assert_same(read(cached(source, transforms), 3, start=4), whole[4:])
    halves = [read(cached(source, transforms, rank=rank, world_size=2), 7) for rank in (0, 1)]
    for sample, first, second in zip(whole, *halves, strict=True):
        assert torch.equal(sample.index, torch.cat([first.index, second.index]))
        for view, pair in enumerate(zip(first.all_views, second.all_views, strict=True)):
            torch.testing.assert_close(sample.all_views[view], torch.cat(pair), rtol=0, atol=1e-5)


class Counted(Photos):
    reads = 0

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        type(self).reads += 1
        return super().__getitem__(index)


def test_a_cached_source_is_read_once() -> None:
    batches = cached(Counted(30))
    list(itertools.islice(batches, 9))
    batches.start(2)  # another place: the pictures stay
    next(batches)
    batches.close()
    assert Counted.reads == 30


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_fill_the_cache() -> None:
    assert_same(read(cached(Photos(bad=(4,)), num_workers=2), 4), read(cached(Photos(bad=(4,))), 4))


def test_bad_files_are_counted_while_the_cache_is_filled() -> None:
    bad_files = BadFiles(None, 30, max_unreadable=0.05)
    batches = CachedBatches(dataset(Photos(bad=(1, 2))), batch_size=8, seed=3, bad_files=bad_files)
    with pytest.raises(UserError, match="2 of 30 images"):
        next(batches)


def test_a_cache_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selftask.data.cache.on_device.free_bytes", lambda device: 30_000)
    with pytest.raises(UserError, match=r"30 images in 30x22 take 0.0 GiB.*data.cache=none"):
        next(cached(Photos()))


def test_free_memory_is_known() -> None:
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_same_views_without_a_wait() -> None:
    """On its side stream, with no synchronization once constants are there."""
    make = lambda device: Batches(  # noqa: E731
        dataset(Photos(same=True)), batch_size=8, seed=3, device=torch.device(device)
    )
    expected, batches = read(make("cpu"), 6), make("cuda")
    actual = [next(batches)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual += list(itertools.islice(batches, 5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        batches.close()
    on_host = [
        replace(
            batch,
            views={name: [view.cpu() for view in views] for name, views in batch.views.items()},
            index=batch.index.cpu(),
            labels=batch.labels.cpu(),
        )
        for batch in actual
    ]
    assert_same(on_host, expected, levels=0.5)
