"""The order is a permutation, looks random, and can be entered anywhere."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from selftask.data.sampler import BatchSampler, EpochOrder
from selftask.errors import ConfigError


def test_every_order_is_a_permutation() -> None:
    for n in [*range(1, 300), *range(300, 2001, 17), 2000]:
        assert np.array_equal(np.sort(EpochOrder(7, n % 5, n)[:]), np.arange(n)), n


def test_slices_agree_with_the_whole() -> None:
    order = EpochOrder(3, 2, 1000)
    whole = order[:]
    for start, stop in [(0, 1), (10, 200), (990, 2000), (5, 5)]:
        assert np.array_equal(order[start:stop], whole[start:stop])


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = [EpochOrder(seed, epoch, 1000)[:] for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for a, b in itertools.combinations(orders, 2):
        assert (a == b).sum() < 10  # one on average


@pytest.mark.parametrize("n", [10, 97, 1000])
def test_positions_are_uniform(n: int) -> None:
    """Chi-square of (position, index) counts, in at most 10x10 cells, over many epochs."""
    epochs, cells = 2000, min(n, 10)
    rows = np.arange(n) * cells // n
    counts = np.zeros((cells, cells))
    for epoch in range(epochs):
        np.add.at(counts, (rows, EpochOrder(11, epoch, n)[:] * cells // n), 1)
    size = np.bincount(rows).astype(float)
    expected = np.outer(size, size) / n * epochs
    chi2 = ((counts - expected) ** 2 / expected).sum() * (n - 1) / n
    freedom = (cells - 1) ** 2
    assert abs(chi2 - freedom) < 4.5 * np.sqrt(2 * freedom)


def test_neighbours_are_unrelated() -> None:
    """Differences of adjacent entries, as of independent draws: uniform modulo n."""
    n, cells = 4096, 64
    counts = np.zeros(cells)
    for epoch in range(50):
        steps = np.diff(EpochOrder(5, epoch, n)[:]) % n
        counts += np.bincount(steps * cells // n, minlength=cells)
    expected = counts.sum() / cells
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - (cells - 1)) < 4.5 * np.sqrt(2 * (cells - 1))


def test_seeking_in_a_huge_epoch_costs_nothing() -> None:
    started = time.perf_counter()
    order = EpochOrder(0, 0, 10**12)
    part = order[999_999_999_000 : 10**12]
    assert len(np.unique(part)) == 1000
    assert 0 <= part.min() and part.max() < 10**12
    assert time.perf_counter() - started < 0.2


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
        keys = sum(batches[epoch * 6 : epoch * 6 + 6], [])
        assert {e for e, _ in keys} == {epoch}
        assert len({index for _, index in keys}) == 48
    assert batches[:6] != batches[6:]


def test_impossible_batches() -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_size: 64 is more than the 40 images"):
        BatchSampler(40, 64, seed=0)
    with pytest.raises(ConfigError, match="10 cannot be divided among 4 processes"):
        BatchSampler(40, 10, seed=0, world_size=4)
