"""Draws of methods: against Python integers, and statistical tests."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from selftask.random.keyed import batch_normal, batch_uniform, uniform

MASK = (1 << 64) - 1


def _splitmix64(start: int, place: int) -> int:
    """The published generator (Vigna, splitmix64.c) in python's unbounded integers."""
    state = (start + (place + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def _uniform(seed: int, epoch: int, index: int, j: int) -> float:
    key = _splitmix64(seed ^ int.from_bytes(b"method", "big"), epoch)
    return (_splitmix64(_splitmix64(key, index), j) >> 40) / 2**24


def keys(epoch: int, index: Tensor) -> Tensor:
    return torch.stack([torch.full_like(index, epoch), index], dim=1)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_draws_are_those_of_unbounded_integers(seed: int) -> None:
    index = torch.tensor([0, 1, 7, 1_281_166, 2**40])
    for epoch in (0, 3, 799):
        draws = uniform(seed, keys(epoch, index), 6)
        expected = [[_uniform(seed, epoch, i, j) for j in range(6)] for i in index.tolist()]
        assert draws.dtype == torch.float32
        assert draws.tolist() == expected


def test_a_draw_does_not_depend_on_the_others() -> None:
    """Batches, ranks and longer rows all show the same table."""
    index = torch.randperm(1000)[:64]
    whole = uniform(5, keys(2, index), 20)
    for part in (slice(0, 32), slice(32, 64), slice(17, 18)):  # two ranks, one image
        assert torch.equal(uniform(5, keys(2, index[part]), 20), whole[part])
    assert torch.equal(uniform(5, keys(2, index), 7), whole[:, :7])
    assert torch.equal(uniform(5, keys(2, index.flip(0)), 20), whole.flip(0))
    state = torch.get_rng_state()
    uniform(5, keys(2, index), 20)
    assert torch.equal(torch.get_rng_state(), state)


def _chi_square(cells: Tensor) -> float:
    """How many standard deviations the statistic of counts lies above its mean."""
    expected = cells.sum() / cells.numel()
    freedom = cells.numel() - 1
    statistic = float(((cells - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 1), (12345, 300)])
def test_draws_are_uniform(seed: int, epoch: int) -> None:
    draws = uniform(seed, keys(epoch, torch.arange(2000)), 200)
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    assert abs(_chi_square(torch.histc(draws, 256, 0, 1))) < 4
    lowest = (draws * 2**24).long() % 256  # the last bits are as good as the first
    assert abs(_chi_square(lowest.flatten().bincount(minlength=256).double())) < 4
    # the mean of 200 uniform numbers has a deviation of 1 / sqrt(12 * 200)
    assert float(draws.mean(dim=1).std()) == pytest.approx(1 / math.sqrt(2400), rel=0.05)
    assert float(draws.mean(dim=0).std()) == pytest.approx(1 / math.sqrt(24000), rel=0.15)


def test_neighbors_in_every_name_are_independent() -> None:
    """Pairs fill the unit square evenly: next place, next sample, next epoch, next seed."""
    index = torch.arange(4000)
    here = uniform(0, keys(0, index), 100)
    pairs = {
        "place": (here[:, :-1], here[:, 1:]),
        "sample": (here[:-1], here[1:]),
        "epoch": (here, uniform(0, keys(1, index), 100)),
        "seed": (here, uniform(1, keys(0, index), 100)),
    }
    for name, (one, other) in pairs.items():
        cells = (one * 16).long() * 16 + (other * 16).long()
        assert abs(_chi_square(cells.flatten().bincount(minlength=256).double())) < 4, name
        together = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(together)[0, 1])) < 4 / math.sqrt(one.numel()), name


def test_orders_are_all_equally_likely() -> None:
    """What a mask is made of: the 24 orders of four draws."""
    order = uniform(3, keys(1, torch.arange(48_000)), 4).argsort(dim=1, stable=True)
    counts = (order * torch.tensor([64, 16, 4, 1])).sum(dim=1).bincount()
    assert int((counts > 0).sum()) == 24
    assert abs(_chi_square(counts[counts > 0].double())) < 4


# -- draws of a batch ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_draws_of_a_batch_are_those_of_unbounded_integers(seed: int) -> None:
    for number in (0, 1, 10**9):
        start = _splitmix64(seed ^ int.from_bytes(b"batches", "big"), number)
        bits = [_splitmix64(start, j) >> 40 for j in range(6)]
        assert batch_uniform(seed, number, 6).tolist() == [b / 2**24 for b in bits]
        assert torch.equal(batch_uniform(seed, number, 3), batch_uniform(seed, number, 6)[:3])


def test_draws_of_batches_are_uniform_and_normal() -> None:
    """Over batches for one draw, and over the draws of one batch; moments of the normal one."""
    over_batches = torch.stack([batch_uniform(7, number, 1)[0] for number in range(2000)])
    for draws in (over_batches, batch_uniform(7, 3, 2000)):
        assert abs(_chi_square((draws * 20).long().bincount(minlength=20).double())) < 4
    normal = batch_normal(7, 3, 100_000)
    assert normal.isfinite().all()
    moments = [float(normal.pow(power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0.0, 1.0, 0.0, 3.0], abs=0.1)


def test_normal_draws_of_the_smallest_and_largest_bits_are_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = torch.tensor([0, 2**24 - 1])
    monkeypatch.setattr("selftask.random.keyed._of_batch", lambda *_: ends)
    assert batch_normal(0, 0, 2).isfinite().all()
