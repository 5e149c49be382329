"""Permutations computed position by position: they are permutations, and look random.

What a test statistic is held against is what independent true permutations give, by theory or by
numpy's own; the seeds are fixed, so that a test either always passes or never.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from scipy import stats

from selftask.random.permutation import BLOCK, FeistelOrder, SetOrders, SortedOrder, epoch_order

KINDS = [SortedOrder, FeistelOrder]
SIZES = [97, 1000, 4097, 65_536]  # primes, just above a power of two, and one
UNLIKELY = 1e-4  # a p-value below this fails; about 60 are looked at
BILLION = 10**9


def whole_order(kind: Any, seed: int, epoch: int, n: int) -> np.ndarray:
    order: np.ndarray = kind(seed, epoch, n).at(np.arange(n))
    return order


@pytest.mark.parametrize("kind", KINDS)
def test_every_order_is_a_permutation(kind: Any) -> None:
    for n in [*range(1, 300), *range(300, 2001, 17), 2000]:
        assert np.array_equal(np.sort(whole_order(kind, 7, n % 5, n)), np.arange(n)), n


@pytest.mark.parametrize("n", [2**20 + 1, pytest.param(2**22, marks=pytest.mark.slow)])
def test_large_orders_are_permutations(n: int) -> None:
    """All positions of all ranks, whatever their number: they are the positions of the order."""
    seen = np.zeros(n, dtype=bool)
    order = FeistelOrder(1, 2, n)
    for first in range(0, n, 1 << 18):
        seen[order.at(np.arange(first, min(first + (1 << 18), n)))] = True
    assert seen.all()


@pytest.mark.parametrize("n", [1000, 20_000])
def test_parts_agree_with_the_whole(n: int) -> None:
    order = epoch_order(3, 2, n)
    whole = order.at(np.arange(n))
    positions = np.random.default_rng(0).integers(0, n, (7, 5))
    assert np.array_equal(order.at(positions), whole[positions])


def test_orders_of_sets_are_permutations_of_each() -> None:
    sizes = np.array([1, 2, 3, 5, 63, 64, 65, 100, 1000, 100])
    sets = np.repeat(np.arange(len(sizes)), sizes)
    places = np.concatenate([np.arange(size) for size in sizes])
    made = SetOrders(1, 2).at(sets, sizes[sets], places)
    for number, size in enumerate(sizes):
        assert np.array_equal(np.sort(made[sets == number]), np.arange(size))
    assert not np.array_equal(made[sets == 7], made[sets == 9]), "same size, another order"
    some = np.random.default_rng(0).permutation(len(sets))[:200]
    assert np.array_equal(
        SetOrders(1, 2).at(sets[some], sizes[sets[some]], places[some]), made[some]
    )


# -- do they look random? ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_orders_differ_by_seed_and_epoch(kind: Any) -> None:
    orders = [whole_order(kind, seed, epoch, 1000) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for a, b in itertools.combinations(orders, 2):
        assert (a == b).sum() < 10  # one on average


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [10, 97, 1000])
def test_positions_are_uniform(kind: Any, n: int) -> None:
    """Chi-square of (position, index) counts, in at most 10x10 cells, over many epochs.

    In a permutation the counts of a row add up, and so do those of a column: (cells - 1)**2
    degrees of freedom, and a variance larger by n / (n - 1).
    """
    epochs, cells = 300, min(n, 10)
    rows = np.arange(n) * cells // n
    counts = np.zeros((cells, cells))
    for epoch in range(epochs):
        np.add.at(counts, (rows, whole_order(kind, 11, epoch, n) * cells // n), 1)
    size = np.bincount(rows).astype(float)
    expected = np.outer(size, size) / n * epochs
    chi2 = ((counts - expected) ** 2 / expected).sum() * (n - 1) / n
    assert UNLIKELY < stats.chi2.sf(chi2, (cells - 1) ** 2) < 1 - UNLIKELY


@pytest.mark.parametrize("n", SIZES)
def test_neighbors_are_unrelated(n: int) -> None:
    """Differences of adjacent entries modulo n: each of 1..n-1 as likely, in a true permutation."""
    cells, epochs = 64, min(600, max(1, 200_000 // n))
    edges = np.linspace(1, n, cells + 1).round().astype(int)
    counts = np.zeros(cells)
    for epoch in range(epochs):
        steps = np.diff(whole_order(FeistelOrder, 5, epoch, n)) % n
        counts += np.histogram(steps, edges)[0]
    expected = counts.sum() * np.diff(edges) / (n - 1)
    assert UNLIKELY < stats.chisquare(counts, expected).pvalue < 1 - UNLIKELY


@pytest.mark.parametrize("n", SIZES)
def test_runs_up_and_fixed_points_are_those_of_chance(n: int) -> None:
    """Ascents: mean (n - 1) / 2 and variance (n + 1) / 12; fixed points: Poisson with mean 1."""
    epochs = min(400, max(20, 400_000 // n))
    ascents, fixed = np.zeros(epochs), 0
    for epoch in range(epochs):
        order = whole_order(FeistelOrder, 13, epoch, n)
        ascents[epoch] = (np.diff(order) > 0).sum()
        fixed += int((order == np.arange(n)).sum())
    ascents += np.random.default_rng(0).uniform(-0.5, 0.5, epochs)  # whole numbers, made continuous
    scores = (ascents - (n - 1) / 2) / np.sqrt((n + 1) / 12 + 1 / 12)
    assert stats.kstest(scores, "norm").pvalue > UNLIKELY
    assert stats.poisson.ppf(UNLIKELY, epochs) <= fixed <= stats.poisson.ppf(1 - UNLIKELY, epochs)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("apart", [1, 2, 64])
def test_epochs_are_unrelated(n: int, apart: int) -> None:
    """Rank correlation of two epochs has mean 0 and variance 1 / (n - 1); so have seeds."""
    pairs = 20
    scores = []
    for number in range(pairs):
        first = whole_order(FeistelOrder, 17, number, n)
        for seed, epoch in ((17, number + apart), (17 + apart, number)):
            second = whole_order(FeistelOrder, seed, epoch, n)
            scores.append(np.corrcoef(first, second)[0, 1] * np.sqrt(n - 1))
    assert stats.kstest(scores, "norm").pvalue > UNLIKELY
    assert np.abs(scores).max() < stats.norm.isf(UNLIKELY / 2)


@pytest.mark.parametrize("n", [97, 1000])
def test_pairs_meet_as_often_as_by_chance(n: int) -> None:
    """How often two images share a batch, over many epochs: all pairs alike.

    Against as many of numpy's permutations: the distributions of counts over pairs are the same.
    """
    epochs, batch = 200, 10
    meetings = []
    rng = np.random.default_rng(0)
    for make in (
        lambda epoch: whole_order(FeistelOrder, 3, epoch, n),
        lambda _: rng.permutation(n),
    ):
        together = np.zeros((n, n), dtype=np.int32)
        for epoch in range(epochs):
            order = make(epoch)[: n // batch * batch].reshape(-1, batch)
            for column in range(1, batch):
                together[order, np.roll(order, column, axis=1)] += 1
        meetings.append(together[np.triu_indices(n, 1)])
    mean = epochs * (n // batch) * batch * (batch - 1) / (n * (n - 1))
    for counts in meetings:
        assert counts.mean() == pytest.approx(mean, rel=1e-9)
    ours, numpys = (np.bincount(np.minimum(c, 2 * mean + 8).astype(int)) for c in meetings)
    width = max(len(ours), len(numpys))
    table = np.stack([np.pad(c, (0, width - len(c))) for c in (ours, numpys)])
    table = table[:, table.sum(axis=0) >= 20]
    assert stats.chi2_contingency(table).pvalue > UNLIKELY


@pytest.mark.parametrize("size", [5, 37, 1000])
def test_orders_of_sets_look_random(size: int) -> None:
    """The first place of many sets holds each number as often, and unlike the set beside it."""
    count = 40_000
    first = SetOrders(2, 0).at(np.arange(count), np.full(count, size), np.zeros(count, dtype=int))
    assert stats.chisquare(np.bincount(first, minlength=size)).pvalue > UNLIKELY
    beside = np.bincount((first[1:] - first[:-1]) % size, minlength=size)
    assert stats.chisquare(beside).pvalue > UNLIKELY


# -- a billion samples -----------------------------------------------------------------------------


def test_a_billion_samples_start_at_once() -> None:
    """Next to no time (tools/bench/sampler.py measures it) and under 5 MB to any block."""
    positions = np.arange(BILLION - BLOCK // 4, BILLION)
    times = []
    tracemalloc.start()
    for epoch in range(5):
        started = time.thread_time()
        epoch_order(0, epoch, BILLION).at(positions)
        times.append(time.thread_time() - started)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(times) < 0.05  # a permutation of all takes a minute
    assert peak < 5e6


def test_seeking_in_a_huge_epoch_costs_nothing() -> None:
    started = time.perf_counter()
    part = epoch_order(0, 0, 10**12).at(np.arange(999_999_999_000, 10**12))
    assert len(np.unique(part)) == 1000
    assert part.min() >= 0
    assert part.max() < 10**12
    assert time.perf_counter() - started < 60  # all of it would take days


@pytest.mark.parametrize("n", [BILLION, 2**30, 2**30 + 1])
def test_a_billion_samples_are_spread_evenly(n: int) -> None:
    """A block of adjacent positions falls evenly over the images, and its parity bits are fair."""
    order = FeistelOrder(9, 4, n)
    for first in (0, n // 3, n - 100_000):
        indices = order.at(np.arange(first, first + 100_000))
        assert len(np.unique(indices)) == 100_000
        assert stats.chisquare(np.histogram(indices, 100, (0, n))[0]).pvalue > UNLIKELY
        steps = np.diff(indices) % n
        assert stats.chisquare(np.histogram(steps, 100, (0, n))[0]).pvalue > UNLIKELY
        assert stats.binomtest(int((indices & 1).sum()), 100_000).pvalue > UNLIKELY
