"""splitmix64 and Philox: published test vectors, equal forms, and statistical tests of streams."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from selftask.random import process_state
from selftask.random.keyed import uniform
from selftask.random.philox import philox
from selftask.random.splitmix import GOLDEN, MASK, hash_words, mix, splitmix64
from selftask.random.views import Streams, ViewDraws, draw_at, draw_rng, uniforms

UNLIKELY = 1e-4  # a p-value below this fails; seeds are fixed, so a test passes always or never
# Vigna's splitmix64.c: the first numbers from a start
SPLITMIX = {
    0: [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
        0xF88BB8A8724C81EC,
        0x1B39896A51A8749B,
    ],
    1234567: [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ],
}
# Random123's kat_vectors, philox4x64 with 10 rounds: counter, key, result
PHILOX = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (MASK,) * 4,
        (MASK,) * 2,
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


@pytest.mark.parametrize("start", SPLITMIX)
def test_all_forms_of_splitmix64_give_the_published_numbers(start: int) -> None:
    expected = SPLITMIX[start]
    states = [(start + (place + 1) * GOLDEN) & MASK for place in range(len(expected))]
    assert mix(np.array(states, dtype=np.uint64)).tolist() == expected
    bits = splitmix64(torch.tensor(start), torch.arange(len(expected)))
    assert [number & MASK for number in bits.tolist()] == expected
    assert [hash_words(state - GOLDEN) for state in states] == expected


def test_forms_of_splitmix64_agree_on_any_word() -> None:
    words = np.random.default_rng(0).integers(0, MASK, 1000, dtype=np.uint64, endpoint=True)
    words[:4] = (0, 1, 1 << 63, MASK)
    by_numpy = mix(words + np.uint64(GOLDEN))
    assert [hash_words(word) for word in words.tolist()] == by_numpy.tolist()
    by_torch = splitmix64(torch.from_numpy(words.view(np.int64)), torch.tensor(0))
    assert np.array_equal(by_torch.numpy().view(np.uint64), by_numpy)
    chained = hash_words(5, 6)
    assert chained == hash_words(hash_words(5) + 6)
    assert chained != hash_words(6, 5)


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox([np.array([word], dtype=np.uint64) for word in counter], key)
    assert tuple(int(word[0]) for word in words) == expected


def test_philox_is_numpys() -> None:
    """NumPy adds one to the counter before each block."""
    rng = np.random.default_rng(1)
    counters = rng.integers(0, MASK, (50, 4), dtype=np.uint64, endpoint=True)
    counters[:, 0] &= np.uint64(MASK - 1)  # the addition does not carry
    ours = np.stack(philox(list(counters.T + np.array([[1], [0], [0], [0]], np.uint64)), (7, MASK)))
    for counter, expected in zip(counters, ours.T, strict=True):
        numpys = np.random.Philox(key=np.array([7, MASK], np.uint64), counter=counter)
        assert np.array_equal(numpys.random_raw(4), expected)


def test_streams_are_distinct_and_repeatable() -> None:
    places = list(itertools.product((0, 1), (0, 1), (0, 1, 2), (0, 1)))
    firsts = {draw_rng(*place).integers(0, 2**63) for place in places}
    assert len(firsts) == len(places)
    draws = ViewDraws(1)
    for epoch, index, view in [(3, 10**12, 1), (0, 0, 0), (3, 10**12, 1)]:
        generator = draws.at(epoch, index, view)
        expected = draw_rng(1, epoch, index, view)
        assert np.array_equal(generator.random(50), expected.random(50))
        assert generator.integers(0, 7, dtype=np.int32) == expected.integers(0, 7, dtype=np.int32)


def test_streams_look_independent() -> None:
    values = np.array([draw_rng(0, 0, index, 0).random(8) for index in range(2000)])
    correlation = np.corrcoef(np.concatenate([values[:-1], values[1:]], axis=1).T)
    assert np.abs(correlation - np.eye(16)).max() < 5 / np.sqrt(2000)
    assert abs(values.mean() - 0.5) < 5 * np.sqrt(1 / 12 / values.size)


def test_uniforms_are_numpys() -> None:
    epochs, indices = np.array([0, 3, (5 << 32) + 7, 2]), np.array([0, 9, 10**9, 2**40])
    keys = list(zip(epochs.tolist(), indices.tolist(), strict=True))
    for seed, view in ((0, 0), (2**63 + 11, 4)):
        expected = np.stack([draw_rng(seed, *key, view).random(30) for key in keys])
        assert np.array_equal(uniforms(seed, epochs, indices, view, 30), expected)
        later = uniforms(seed, epochs, indices, view, 10, start=8)
        assert np.array_equal(later, expected[:, 8:18])


def test_streams_keep_a_position_for_each_sample() -> None:
    streams = Streams(1, np.zeros(3, np.int64), np.arange(3), 0)
    expected = np.stack([draw_rng(1, 0, index, 0).random(200) for index in range(3)])
    assert np.array_equal(streams.random(2), expected[:, :2])
    assert np.array_equal(streams.random(3, np.array([2, 0])), expected[[2, 0], 2:5])
    assert np.array_equal(streams.random(100, np.array([1, 2]))[0], expected[1, 2:102])
    assert np.array_equal(streams.random(1)[:, 0], expected[[0, 1, 2], [5, 102, 105]])


def test_a_block_is_read_from_anywhere_in_the_stream() -> None:
    rng = draw_rng(4, 1, 2, 3)
    first = draw_at(rng, 1 << 63)
    rng.random(77)
    assert draw_at(rng, 1 << 63) == first
    assert draw_at(rng, (1 << 63) + 1) != first
    words = [np.array([word], dtype=np.uint64) for word in ((1 << 63) + 1, 3, 2, 1)]
    assert first == (int(philox(words, (4, 0x76696577))[0][0]) >> 11) * 2.0**-53


# -- do they look random? ------------------------------------------------------------------------

NAMES = ["seed", "epoch", "index", "view"]


def _words(seed: int, epoch: int, index: int, view: int) -> np.ndarray:
    """The first four words of a view's stream."""
    return draw_rng(seed, epoch, index, view).bit_generator.random_raw(4)


@pytest.mark.parametrize("name", NAMES)
def test_each_bit_of_a_key_changes_half_of_the_bits(name: str) -> None:
    """Avalanche: bits that differ are binomial, with one half, for each bit and in total."""
    place, bits = NAMES.index(name), 32
    trials, changed = 30, []
    rng = np.random.default_rng(place)
    for _ in range(trials):
        key = rng.integers(0, 1 << 31, 4).tolist()
        before = _words(*key)
        for bit in range(bits):
            other = list(key)
            other[place] ^= 1 << bit
            changed.append(np.unpackbits((before ^ _words(*other)).view(np.uint8)))
    flips = np.array(changed)  # (trials * bits, 256)
    total = stats.binomtest(int(flips.sum()), flips.size)
    assert total.pvalue > UNLIKELY
    per_bit = flips.sum(0)
    scores = (per_bit - len(flips) / 2) / math.sqrt(len(flips) / 4)
    assert stats.chi2.sf((scores**2).sum(), len(scores)) > UNLIKELY
    assert stats.chi2.cdf((scores**2).sum(), len(scores)) > UNLIKELY


@pytest.mark.parametrize("algorithm", ["hash_words", "mix"])
def test_splitmix64_mixes_each_bit_into_all(algorithm: str) -> None:
    words = np.random.default_rng(3).integers(0, MASK, 400, dtype=np.uint64, endpoint=True)
    for bit in range(64):
        other = words ^ np.uint64(1 << bit)
        if algorithm == "mix":
            difference = mix(words) ^ mix(other)
        else:
            pairs = zip(words.tolist(), other.tolist(), strict=True)
            difference = np.array([hash_words(1, a) ^ hash_words(1, b) for a, b in pairs], "u8")
        share = np.unpackbits(difference.view(np.uint8)).mean()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(400 * 64), bit


@pytest.mark.parametrize("name", NAMES)
def test_neighboring_streams_fill_the_unit_square(name: str) -> None:
    """Draws of two streams whose keys differ by one in ``name`` are uniform and independent."""
    place, count = NAMES.index(name), 4000
    zeros = np.zeros(count, dtype=np.int64)
    keys = [[7, zeros, np.arange(count), 0] for _ in range(2)]
    keys[1][place] = keys[1][place] + 1
    one, other = (uniforms(*key, 16) for key in keys)
    cells = np.bincount(((one * 16).astype(int) * 16 + (other * 16).astype(int)).ravel())
    assert UNLIKELY < stats.chisquare(cells).pvalue < 1 - UNLIKELY
    assert len(cells) == 256
    correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
    assert abs(correlation) < 4 / math.sqrt(one.size)


def test_streams_of_views_and_of_methods_are_unrelated() -> None:
    """Both are keyed by (seed, epoch, index)."""
    index = np.arange(4000)
    views = uniforms(0, np.zeros_like(index), index, 0, 16)
    key = torch.stack([torch.zeros(4000, dtype=torch.int64), torch.from_numpy(index)], dim=1)
    methods = uniform(0, key, 16).double().numpy()
    assert abs(np.corrcoef(views.ravel(), methods.ravel())[0, 1]) < 4 / math.sqrt(views.size)


def test_the_global_generators_are_seeded_saved_and_restored() -> None:
    """Python's, NumPy's and torch's; each rank has its own. NumPy keeps every second normal."""

    def draws() -> tuple[float, ...]:
        torchs = float(torch.rand(())), float(torch.randn(()))
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torchs

    process_state.seed_all(3, rank=1)
    first = draws()
    state = process_state.rng_state()
    second = draws()
    process_state.seed_all(3, rank=1)
    assert (draws(), draws()) == (first, second)
    process_state.set_rng_state(state)
    assert draws() == second
    for seed, rank in ((3, 0), (4, 1)):
        process_state.seed_all(seed, rank)
        assert not {*draws()} & {*first}
