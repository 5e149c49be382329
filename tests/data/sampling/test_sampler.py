"""Batches are parts of one order: for any world size, from any step on, for every sampler."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from selftask.data.sampling.sampler import BatchSampler, Pool, Sampler, epoch_of
from selftask.data.sampling.shuffled import Shuffled
from selftask.errors import ConfigError, UserError
from selftask.random.permutation import FeistelOrder, epoch_order
from selftask.registry import SAMPLERS

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(6), [70, 40, 25, 12, 10, 3]))
ALL = ["shuffled", "repeated", "stratified", "power_law", "balanced", "weighted", "few_classes"]
ALL += ["sequential", "first"]


def make(
    name: str, n: int = 160, batch_size: int = 12, *, seed: int = 0, **args: object
) -> Sampler:
    """A sampler over images with LABELS, or without any where n is another."""
    labels = LABELS if n == len(LABELS) else None
    cls = SAMPLERS[name]
    config = cls.Config(**args) if hasattr(cls, "Config") else None
    sampler: Sampler = cls(config, Pool(n, batch_size, seed, labels))
    return sampler


def shuffled(n: int, batch_size: int, *, seed: int = 0, **more: int) -> BatchSampler:
    return BatchSampler(Shuffled(None, Pool(n, batch_size, seed)), **more)


@pytest.fixture
def any_sampler(request: pytest.FixtureRequest, tmp_path: Path) -> Sampler:
    if request.param == "weighted":
        np.save(tmp_path / "w.npy", np.arange(len(LABELS)) % 5)
        return make("weighted", weights=str(tmp_path / "w.npy"), seed=3)
    return make(request.param, seed=3)


every_sampler = pytest.mark.parametrize("any_sampler", ALL, indirect=True)


# -- the contract ----------------------------------------------------------------------------------


@every_sampler
def test_ranks_share_each_global_batch(any_sampler: Sampler) -> None:
    whole = iter(BatchSampler(any_sampler))
    for world_size in (2, 3, 12):
        whole = iter(BatchSampler(any_sampler))
        parts = [
            iter(BatchSampler(any_sampler, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        for _ in range(30):
            assert next(whole) == [key for part in parts for key in next(part)]


@every_sampler
def test_seeking_is_counting(any_sampler: Sampler) -> None:
    whole = list(itertools.islice(BatchSampler(any_sampler), 40))
    for start in (0, 1, 5, 12, 13, 14, 26, 39):
        assert next(iter(BatchSampler(any_sampler, start=start))) == whole[start]
        part = BatchSampler(any_sampler, rank=1, world_size=3, start=start)
        assert next(iter(part)) == whole[start][4:8]


@every_sampler
def test_keys_name_the_epoch_and_no_showing_twice(any_sampler: Sampler) -> None:
    """Draws are a function of the key: those of two showings of an image must differ."""
    batches = BatchSampler(any_sampler)
    for epoch in range(3):
        keys = list(
            itertools.chain(
                *itertools.islice(
                    BatchSampler(any_sampler, start=epoch * batches.steps_per_epoch),
                    batches.steps_per_epoch,
                )
            )
        )
        assert {epoch_of(key) for key, _ in keys} == {epoch}
        assert len(set(keys)) == len(keys) == batches.steps_per_epoch * 12
        indices = [index for _, index in keys]
        assert any_sampler.repeats == (len(set(indices)) < len(indices))
        assert 0 <= min(indices) <= max(indices) < len(LABELS)


@every_sampler
def test_seeds_and_epochs_make_other_orders(any_sampler: Sampler) -> None:
    positions = np.arange(any_sampler.num_samples // 12 * 12)
    orders = [any_sampler.order(epoch).at(positions).tolist() for epoch in range(4)]
    if type(any_sampler).__name__ == "Sequential":
        assert orders == [positions.tolist()] * 4
    else:
        assert len(set(map(tuple, orders))) == 4
        other = type(any_sampler)(any_sampler.config, Pool(160, 12, 4, LABELS))
        assert other.order(0).at(positions).tolist() not in orders


@every_sampler
def test_one_line_says_how_long_an_epoch_is(any_sampler: Sampler) -> None:
    batches = BatchSampler(any_sampler)
    number = batches.steps_per_epoch
    word = "batch" if number == 1 else "batches"
    assert f"an epoch is {number} {word} of 12 = {number * 12} samples" in batches.describe()


def test_epochs_drop_the_partial_batch_and_do_not_repeat() -> None:
    batches = list(itertools.islice(shuffled(50, 8, seed=4), 12))
    orders = []
    for epoch in range(2):
        keys = list(itertools.chain(*batches[epoch * 6 : epoch * 6 + 6]))
        assert {e for e, _ in keys} == {epoch}
        orders.append([index for _, index in keys])
        assert len(set(orders[-1])) == 48
    assert orders[0] != orders[1]
    assert all(order != sorted(order) for order in orders), "shuffled"
    other = [index for _, index in next(iter(shuffled(50, 8, seed=5)))]
    assert other != orders[0][:8], "by the seed"


def test_large_epochs_are_read_in_blocks() -> None:
    """Batches on both sides of the border of a block are those of the order."""
    order = epoch_order(1, 0, 50_000)
    batches = itertools.islice(shuffled(50_000, 1000, seed=1, start=3), 12)
    for step, batch in enumerate(batches, 3):
        expected = order.at(np.arange(step * 1000, (step + 1) * 1000))
        assert batch == [(0, index) for index in expected.tolist()]


def test_impossible_batches() -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_size: 64 is more than the 40 images"):
        shuffled(40, 64)
    with pytest.raises(ConfigError, match="10 cannot be divided among 4 processes"):
        shuffled(40, 10, world_size=4)
    with pytest.raises(ConfigError, match=r"train\.batch_size: 64 is more than the 40 images"):
        BatchSampler(make("repeated", 40, 64, times=2))


# -- a billion samples on 4,096 ranks --------------------------------------------------------------


@pytest.mark.slow
def test_four_thousand_ranks_share_a_billion_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample exactly once an epoch, shown in three steps.

    The positions of all ranks are a partition of the epoch (exact arithmetic on their slices); the
    order is a bijection (exhaustively at 2**22 in test_order, and here its inverse finds every
    position back); and what each rank really yields is the order at these positions. A whole pass
    with a bitmap is ``tools/bench/sampler.py --prove``.
    """
    n, ranks, per_rank, seed = 10**9, 4096, 64, 5
    monkeypatch.setattr("selftask.data.sampling.sampler.BLOCK", per_rank)  # no reading ahead
    sampler = Shuffled(None, Pool(n, ranks * per_rank, seed))
    steps = BatchSampler(sampler).steps_per_epoch
    assert steps == n // (ranks * per_rank) == 3814
    slices = np.arange(steps)[:, None] * ranks * per_rank + np.arange(ranks) * per_rank
    assert np.array_equal(slices.ravel(), np.arange(steps * ranks) * per_rank)

    order = FeistelOrder(seed, 1, n)
    seen = []
    for rank in range(ranks):
        step = rank * 7919 % steps  # another one for each
        reader = BatchSampler(sampler, rank=rank, world_size=ranks, start=steps + step)
        keys = np.array(next(iter(reader)))
        assert (keys[:, 0] == 1).all()
        expected = slices[step, rank] + np.arange(per_rank)
        assert np.array_equal(keys[:, 1], order.at(expected))
        seen.append(keys[:, 1])
    assert len(np.unique(np.concatenate(seen))) == ranks * per_rank


# -- each sampler ----------------------------------------------------------------------------------


def epoch_indices(sampler: Sampler, epoch: int) -> np.ndarray:
    """All full batches of an epoch, (S, B)."""
    batches = BatchSampler(sampler)
    positions = np.arange(batches.steps_per_epoch * batches.batch_size)
    return sampler.order(epoch).at(positions.reshape(-1, batches.batch_size))


def test_repeated_shows_each_image_so_often_in_its_batch() -> None:
    sampler = make("repeated", 1000, 24, times=3)
    shown = np.zeros(1000, dtype=int)
    for epoch in range(3):
        for batch in epoch_indices(sampler, epoch):
            images, counts = np.unique(batch, return_counts=True)
            assert counts.tolist() == [3] * 8
            shown[images] += 1
            assert np.array_equal(batch[:8], batch[8:16]), "copies are 8 places apart"
    assert shown.max() == 1, "three epochs go through one order"
    assert shown.sum() == 1000 // 24 * 24


def test_stratified_batches_are_alike() -> None:
    sampler = make("stratified", seed=1)
    left_over, losses = set(), set()
    for epoch in range(20):
        batches = epoch_indices(sampler, epoch)
        assert len(np.unique(batches)) == batches.size == 156, "each image once"
        left_over |= set(range(160)) - set(batches.ravel().tolist())
        losses.add(tuple(np.bincount(LABELS[batches.ravel()], minlength=6)))
        mix = np.stack([np.bincount(LABELS[batch], minlength=6) for batch in batches])
        share = 12 * np.bincount(LABELS) / 160
        assert (np.abs(mix.sum(axis=0) - 13 * share) < 2).all(), "left out of all classes alike"
        assert (np.abs(mix - share) < 2).all()
        assert (np.abs(mix - share) < 1).mean() > 0.9
    assert len(left_over) > 20 and len(losses) > 1, "others in each epoch, of other classes"


def test_stratified_batches_are_in_no_order_of_classes() -> None:
    """Rank 0 of 2 gets as many of each class as rank 1, and rare classes come at any time."""
    sampler = make("stratified", seed=1)
    first_half, steps_of_rarest = np.zeros(6), []
    for epoch in range(40):
        classes = LABELS[epoch_indices(sampler, epoch)]
        first_half += np.bincount(classes[:, :6].ravel(), minlength=6)
        steps_of_rarest += np.nonzero((classes == 5).any(axis=1))[0].tolist()
    share = np.bincount(LABELS) / 160
    assert stats.chisquare(first_half, share * first_half.sum(), ddof=0).pvalue > 1e-4
    assert stats.chisquare(np.bincount(steps_of_rarest, minlength=13)).pvalue > 1e-4


@pytest.mark.parametrize(("name", "power"), [("balanced", 0.0), ("power_law", 0.5)])
def test_classes_by_a_power_of_their_frequency(name: str, power: float) -> None:
    args = {"power": power} if name == "power_law" else {}
    sampler = make(name, samples=1600, **args)
    counts = np.bincount(LABELS)
    share = counts**power / (counts**power).sum()
    images = sampler.order(2).at(np.arange(1600))
    assert (np.abs(np.bincount(LABELS[images]) - 1600 * share) < 1).all()
    for label in range(6):
        each = np.bincount(images, minlength=160)[label == LABELS]
        assert each.max() - each.min() <= 1, "images of a class come equally often"


@pytest.mark.parametrize("per_batch", [3, 4])
def test_batches_of_a_few_classes(per_batch: int) -> None:
    """As many images of each; the six classes take turns, rare ones with repeated images."""
    sampler = make("few_classes", classes_per_batch=per_batch, samples=1200)
    batches = epoch_indices(sampler, 1)
    seen = [np.unique(LABELS[batch], return_counts=True) for batch in batches]
    each = 12 // per_batch
    assert all(counts.tolist() == [each] * per_batch for _, counts in seen)
    for batch in batches:  # ranks have classes of their own
        assert all(len(set(LABELS[part])) == 1 for part in batch.reshape(per_batch, each))
    often = np.bincount(np.concatenate([classes for classes, _ in seen]), minlength=6)
    if per_batch == 3:
        assert often.tolist() == [50] * 6
        rounds = [set(seen[k][0]) | set(seen[k + 1][0]) for k in range(0, 100, 2)]
        assert rounds == [set(range(6))] * 50
        for label in range(6):
            times = np.bincount(batches.ravel(), minlength=160)[label == LABELS]
            assert times.max() - times.min() <= 1
    else:
        assert stats.chisquare(often).pvalue > 1e-4 and len({*often}) > 1
    assert len({tuple(classes) for classes, _ in seen}) > 5
    assert f"{per_batch} of 6 classes a batch, {each} images of each" in sampler.describe()


def test_batches_of_too_many_classes() -> None:
    with pytest.raises(UserError, match="classes_per_batch=7: must be at most 6"):
        make("few_classes", classes_per_batch=7)
    with pytest.raises(UserError, match=r"classes_per_batch=5: train\.batch_size=12 cannot"):
        make("few_classes", classes_per_batch=5)


def test_a_class_gets_its_share_of_few_samples() -> None:
    """11 : 19 of 30 images are 1.1 : 1.9 of 3."""
    cls = SAMPLERS["power_law"]
    for sizes, expected in (([11, 19], [1, 2]), ([19, 11], [2, 1])):
        labels = np.repeat([0, 1], sizes)
        sampler = cls(cls.Config(power=1.0, samples=3), Pool(30, 3, 0, labels))
        assert np.bincount(labels[sampler.order(0).at(np.arange(3))]).tolist() == expected


def test_images_that_come_again_in_an_epoch_come_in_another_order() -> None:
    labels = np.repeat([0, 1], 8)
    cls = SAMPLERS["few_classes"]
    sampler = cls(cls.Config(classes_per_batch=1, samples=80), Pool(16, 8, 0, labels))
    batches = sampler.order(0).at(np.arange(80)).reshape(10, 8)
    for label in (0, 1):
        orders = [tuple(batch) for batch in batches if labels[batch[0]] == label]
        assert len(orders) == len(set(orders)) == 5
        assert {tuple(sorted(order)) for order in orders} == {
            tuple(np.flatnonzero(labels == label))
        }


def test_power_one_is_the_data_as_it_is() -> None:
    images = make("power_law", power=1.0).order(0).at(np.arange(160))
    assert sorted(images) == list(range(160))


def test_balanced_takes_other_images_of_frequent_classes_in_other_epochs() -> None:
    sampler = make("balanced")
    epochs = [set(sampler.order(epoch).at(np.arange(160)).tolist()) for epoch in range(12)]
    frequent = set(np.flatnonzero(LABELS == 0).tolist())
    assert all(len(epoch & frequent) in (26, 27) for epoch in epochs)
    assert set().union(*epochs) == set(range(160))


def test_weighted_draws_follow_the_weights(tmp_path: Path) -> None:
    weights = np.array([0.0, 1, 2, 0, 5, 2, 0])
    np.savetxt(tmp_path / "w.txt", weights)
    sampler = make("weighted", 7, 4, weights=str(tmp_path / "w.txt"), samples=20_000)
    assert sampler.num_samples == 20_000
    draws = sampler.order(0).at(np.arange(20_000))
    counts = np.bincount(draws, minlength=7)
    assert counts[weights == 0].sum() == 0
    drawn = weights > 0
    expected = weights[drawn] / weights.sum() * 20_000
    assert stats.chisquare(counts[drawn], expected).pvalue > 1e-4
    pairs = np.histogram2d(draws[:-1], draws[1:], bins=np.arange(8) - 0.5)[0][np.ix_(drawn, drawn)]
    assert stats.chi2_contingency(pairs).pvalue > 1e-4, "draws are independent"
    assert "draws from 4 of 7 images" in sampler.describe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n2\n", r"shape \(2,\); expected \(3,\)"),
        ("1\nx\n2\n", r"expected \.npy, or one number a line"),
        ("1\n-2\n2\n", r"weight -2\.0 of image 1; weights must be"),
        ("0\n0\n0\n", "all weights are 0"),
        (None, r"w\.txt'.*[Nn]o such file|w\.txt.*not found"),
    ],
)
def test_wrong_weights(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "w.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        make("weighted", 3, 2, weights=str(tmp_path / "w.txt"))
    (tmp_path / "w.npy").touch()
    with pytest.raises(UserError, match=r"w\.npy': expected \.npy, or one number a line"):
        make("weighted", 3, 2, weights=str(tmp_path / "w.npy"))


def test_debugging_samplers() -> None:
    assert make("sequential", 10, 4).order(7).at(np.arange(8)).tolist() == list(range(8))
    first = make("first", 100, 16)
    assert first.num_samples == 16
    assert sorted(first.order(3).at(np.arange(16))) == list(range(16))
    assert "the first 16 of 100 images" in first.describe()
    with pytest.raises(UserError, match="the first 101 images are more than the 100"):
        make("first", 100, 16, count=101)
    few, enough = (SAMPLERS["first"].Config(count=count) for count in (15, 16))
    (problem,) = few.problems({"train": {"batch_size": 16}})
    assert problem.startswith("count: 15 images fill no batch")
    assert not [*enough.problems({"train": {"batch_size": 16}})]


@pytest.mark.parametrize("name", ["stratified", "balanced", "power_law", "few_classes"])
def test_samplers_by_class_need_labels(name: str) -> None:
    with pytest.raises(
        UserError, match=r"data\.sampler: .* needs labels, and these images have no"
    ):
        make(name, 100)
    cls = SAMPLERS[name]
    some = np.where(np.arange(160) == 7, -1, LABELS)
    config = cls.Config() if hasattr(cls, "Config") else None
    with pytest.raises(UserError, match=r"1 of 160 images have none \(the first is number 7\)"):
        cls(config, Pool(160, 12, 0, some))
