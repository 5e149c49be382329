"""The order is a permutation, looks random, and can be entered anywhere."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from selftask.data.sampler import BatchSampler, FeistelOrder, SortedOrder, epoch_order
from selftask.errors import ConfigError

KINDS = [SortedOrder, FeistelOrder]


def whole_order(kind: Any, seed: int, epoch: int, n: int) -> np.ndarray:
    order: np.ndarray = kind(seed, epoch, n).at(np.arange(n))
    return order


@pytest.mark.parametrize("kind", KINDS)
def test_every_order_is_a_permutation(kind: Any) -> None:
    for n in [*range(1, 300), *range(300, 2001, 17), 2000]:
        assert np.array_equal(np.sort(whole_order(kind, 7, n % 5, n)), np.arange(n)), n


@pytest.mark.parametrize("n", [1000, 20_000])
def test_parts_agree_with_the_whole(n: int) -> None:
    order = epoch_order(3, 2, n)
    whole = order.at(np.arange(n))
    positions = np.random.default_rng(0).integers(0, n, (7, 5))
    assert np.array_equal(order.at(positions), whole[positions])


@pytest.mark.parametrize("kind", KINDS)
def test_orders_differ_by_seed_and_epoch(kind: Any) -> None:
    orders = [whole_order(kind, seed, epoch, 1000) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for a, b in itertools.combinations(orders, 2):
        assert (a == b).sum() < 10  # one on average


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [10, 97, 1000])
def test_positions_are_uniform(kind: Any, n: int) -> None:
    """Chi-square of (position, index) counts, in at most 10x10 cells, over many epochs."""
    epochs, cells = 1000, min(n, 10)
    rows = np.arange(n) * cells // n
    counts = np.zeros((cells, cells))
    for epoch in range(epochs):
        np.add.at(counts, (rows, whole_order(kind, 11, epoch, n) * cells // n), 1)
    size = np.bincount(rows).astype(float)
    expected = np.outer(size, size) / n * epochs
    chi2 = ((counts - expected) ** 2 / expected).sum() * (n - 1) / n
    freedom = (cells - 1) ** 2
    assert abs(chi2 - freedom) < 4.5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_unrelated(kind: Any) -> None:
    """Differences of adjacent entries, as of independent draws: uniform modulo n."""
    n, cells = 4096, 64
    counts = np.zeros(cells)
    for epoch in range(50):
        steps = np.diff(whole_order(kind, 5, epoch, n)) % n
        counts += np.bincount(steps * cells // n, minlength=cells)
    expected = counts.sum() / cells
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - (cells - 1)) < 4.5 * np.sqrt(2 * (cells - 1))


def test_seeking_in_a_huge_epoch_costs_nothing() -> None:
    started = time.perf_counter()
    part = epoch_order(0, 0, 10**12).at(np.arange(999_999_999_000, 10**12))
    assert len(np.unique(part)) == 1000
    assert part.min() >= 0
    assert part.max() < 10**12
    assert time.perf_counter() - started < 0.2


def test_large_epochs_are_read_in_blocks() -> None:
    """Batches on both sides of the border of a block are those of the order."""
    order = epoch_order(1, 0, 50_000)
    batches = itertools.islice(BatchSampler(50_000, 1000, seed=1, start=3), 12)
    for step, batch in enumerate(batches, 3):
        expected = order.at(np.arange(step * 1000, (step + 1) * 1000))
        assert batch == [(0, index) for index in expected.tolist()]


def test_ranks_share_each_global_batch() -> None:
    whole = iter(BatchSampler(103, 12, seed=1))
    parts = [iter(BatchSampler(103, 12, seed=1, rank=rank, world_size=3)) for rank in range(3)]
    for _ in range(20):
        assert next(whole) == [key for part in parts for key in next(part)]


def test_seeking_is_counting() -> None:
    whole = list(itertools.islice(BatchSampler(50, 8, seed=4), 40))
    for start in (0, 1, 5, 6, 7, 12, 39):
        assert next(iter(BatchSampler(50, 8, seed=4, start=start))) == whole[start]


def test_epochs_drop_the_partial_batch_and_do_not_repeat() -> None:
    batches = list(itertools.islice(BatchSampler(50, 8, seed=4), 12))
    for epoch in range(2):
        keys = list(itertools.chain(*batches[epoch * 6 : epoch * 6 + 6]))
        assert {e for e, _ in keys} == {epoch}
        assert len({index for _, index in keys}) == 48
    assert batches[:6] != batches[6:]


def test_impossible_batches() -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_size: 64 is more than the 40 images"):
        BatchSampler(40, 64, seed=0)
    with pytest.raises(ConfigError, match="10 cannot be divided among 4 processes"):
        BatchSampler(40, 10, seed=0, world_size=4)
