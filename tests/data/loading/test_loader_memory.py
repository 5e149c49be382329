"""The memory that batches come in: used again, but never while anybody has the batch."""

from __future__ import annotations

import errno
import gc
import mmap
import multiprocessing
import os
import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numbered import Numbers, assert_same, dataset, read

from selftask.data.cache.on_device import CacheDataset
from selftask.data.loading import shared_memory
from selftask.data.loading.collate import RawBatch, broken
from selftask.data.loading.loader import Batches, EvalBatches
from selftask.data.loading.shared_memory import SlotPool, SlotRef, SlotWriter
from selftask.data.loading.workers import PREFETCH
from selftask.errors import BadImage, UserError


def batch_of(new: Any, value: int, shape: tuple[int, ...] = (2, 3, 3, 3)) -> RawBatch:
    """A batch of two views full of a number, in arrays of ``new``."""
    views = [torch.from_numpy(new(shape, np.uint8)).fill_(value + k) for k in range(2)]
    index = torch.tensor([value, 8], dtype=torch.int64)
    key = torch.tensor([[1, value], [2, 8]])
    return RawBatch(views, index - 1, index, key, 4, [BadImage("a/b", "broken")], 3)


def opened(sent: RawBatch | SlotRef) -> RawBatch:
    assert isinstance(sent, SlotRef)
    return sent.open()


@pytest.fixture
def memory() -> SlotPool:
    return SlotPool()


def test_a_batch_arrives_as_it_was(memory: SlotPool) -> None:
    outbox = SlotWriter(memory, 0, 1)
    arrived = opened(outbox.send(batch_of(outbox.new, 5)))
    expected = batch_of(np.empty, 5)
    for one, other in zip(arrived.views, expected.views, strict=True):
        assert torch.equal(one, other)
    for name in ("labels", "index", "key"):
        assert torch.equal(getattr(arrived, name), getattr(expected, name))
    assert [str(bad) for bad in arrived.bad] == ["a/b: broken"]
    assert (arrived.epoch, arrived.num_left_out, arrived.problem) == (4, 3, "")


def test_what_was_made_elsewhere_travels_along(memory: SlotPool) -> None:
    outbox = SlotWriter(memory, 0, 1)
    batch = batch_of(outbox.new, 5)
    batch.views[1] = torch.full((2, 2), 6.5)
    sent = outbox.send(batch)
    batch.views[1].zero_()
    arrived = opened(sent)
    assert arrived.views[0].unique().tolist() == [5]
    assert torch.equal(arrived.views[1], torch.full((2, 2), 6.5))
    nothing = broken("not so")
    assert outbox.send(nothing) is nothing


def test_a_slot_is_free_when_the_last_tensor_over_it_is_gone(memory: SlotPool) -> None:
    outbox = SlotWriter(memory, 0, 1)

    def send(value: int) -> SlotRef:
        sent = outbox.send(batch_of(outbox.new, value))
        assert isinstance(sent, SlotRef)
        return sent

    first, second = send(10), send(20)
    assert (first.slot, second.slot) == (0, 1)  # also while nobody has opened them
    kept = first.open().views[1][:1]  # of the first batch, a part of one view
    del first
    batch = second.open()
    known = batch.index  # lies elsewhere: whoever keeps all of an epoch's keeps no picture
    numbers = batch.views[0].numpy()
    del batch
    assert send(30).slot == 2
    assert kept.unique().item() == 11
    assert np.unique(numbers) == [20]
    del kept, numbers
    assert [send(value).slot for value in (40, 50, 60)] == [0, 1, 3]
    assert known.tolist() == [20, 8]


def test_a_pinned_batch_needs_its_slot_no_more(
    memory: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # there may be no GPU
    outbox = SlotWriter(memory, 0, 1)
    sent = outbox.send(batch_of(outbox.new, 5))
    assert memory.map(0, 1)[0] == 1
    pinned = sent.pin_memory()
    assert memory.map(0, 1)[0] == 0
    assert [view.unique().item() for view in pinned.views] == [5, 6]


def test_a_slot_grows_with_its_batches(memory: SlotPool) -> None:
    outbox = SlotWriter(memory, 3, 4)
    for size in (1, 100, 5000, 70, 40_000, 0):
        batch = opened(outbox.send(batch_of(outbox.new, size % 50, (2, 3, size, 3))))
        assert [view.shape for view in batch.views] == [(2, 3, size, 3)] * 2
        assert all((view == size % 50 + k).all() for k, view in enumerate(batch.views))
        del batch
    assert set(memory._mapped) <= {3, 7}


def test_no_worker_takes_the_end_of_the_file_away(
    memory: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that looked how long the file is before another one added to it."""
    memory.map(9, 5000)[4999] = 77
    monkeypatch.setattr(shared_memory.os, "fstat", lambda file: SimpleNamespace(st_size=0))
    memory.map(4, 5000)[4999] = 55
    memory._mapped.clear()
    assert [memory.map(slot, 5000)[4999] for slot in (9, 4)] == [77, 55]


def test_a_forked_process_frees_nothing(memory: SlotPool) -> None:
    outbox = SlotWriter(memory, 0, 1)
    batch = opened(outbox.send(batch_of(outbox.new, 5)))
    child = os.fork()
    if child == 0:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.map(0, 1)[0] == 1
    del batch
    assert memory.map(0, 1)[0] == 0


def test_memory_goes_with_its_loader() -> None:
    memory = SlotPool()
    file = memory._file.fileno()
    outbox = SlotWriter(memory, 0, 1)
    batch = opened(outbox.send(batch_of(outbox.new, 5)))
    del memory, outbox
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert batch.views[0].unique().tolist() == [5]


def raw(workers: int, count: int) -> Batches:
    batches = Batches(dataset(Numbers(count)), batch_size=4, seed=0, num_workers=workers)
    batches.start(0)
    return batches


def test_batches_that_are_kept_stay_as_they_are() -> None:
    """While workers go on making others."""
    with_workers, without = raw(2, 60), raw(0, 60)
    actual = [next(with_workers._reader).views for _ in range(25)]
    expected = [next(without._reader).views for _ in range(25)]
    with_workers.close()
    for one, other in zip(actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_needs_no_more_slots_than_batches_are_under_way() -> None:
    batches = raw(2, 60)
    used = batches._reader._iterator._dataset.memory._mapped  # type: ignore[union-attr]
    for _ in range(60):
        next(batches)
    batches.close()
    assert 2 <= len(used) <= 2 * (PREFETCH + 2)


def test_without_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other systems than Linux."""
    expected = read(Batches(dataset(Numbers(20)), batch_size=4, seed=0), 9)
    monkeypatch.delattr(os, "memfd_create")
    there = Batches(dataset(Numbers(20)), batch_size=4, seed=0, num_workers=2)
    assert_same(read(there, 9), expected)


def test_no_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = mmap.mmap

    def small_ones(file: int, size: int, offset: int = 0) -> mmap.mmap:
        if size > mmap.PAGESIZE:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mapped(file, size, offset=offset)

    monkeypatch.setattr(shared_memory.mmap, "mmap", small_ones)
    batches = Batches(dataset(Numbers(99)), batch_size=99, seed=0, num_workers=1)
    with pytest.raises(UserError, match="data: no memory to share a batch of 1 MiB: Cannot all"):
        SlotPool().map(0, 1 << 20)
    with pytest.raises(
        UserError, match=r"use fewer data\.num_workers or smaller batches"
    ) as caught:
        read(batches, 1)
    assert "Traceback" not in str(caught.value)


def test_a_limit_of_file_sizes_is_named() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 37, limits[1]))
    try:
        with pytest.raises(UserError, match=r"File too large; .*ulimit -f.*data\.num_workers=0$"):
            SlotPool().map(2, 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Sizes(Numbers):
    """CacheDataset of many sizes."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        height, width = 1 + 40 * (index * 7 % 5), 1 + 11 * (index % 9)
        return np.full((height, width, 3), index + 1, dtype=np.uint8), index


def test_canvases_of_other_sizes_hold_nothing_of_earlier_ones() -> None:
    def read_all(workers: int) -> list[Any]:
        pictures: Any = CacheDataset(Sizes(60), None)
        return list(EvalBatches(pictures, batch_size=3, num_workers=workers).read())

    for one, other in zip(read_all(2), read_all(0), strict=True):
        assert torch.equal(one.views[0], other.views[0])
        assert torch.equal(one.sizes, other.sizes)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_processes(method: str) -> None:
    """Workers are forked whatever else starts processes, and whatever the default of python is."""
    multiprocessing.set_start_method(method, force=True)
    try:
        actual = read(Batches(dataset(Numbers(20)), batch_size=4, seed=0, num_workers=1), 5)
    finally:
        multiprocessing.set_start_method(None, force=True)
    assert_same(actual, read(Batches(dataset(Numbers(20)), batch_size=4, seed=0), 5))
