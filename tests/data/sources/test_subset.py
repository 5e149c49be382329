"""Subsets: exact sizes, by class or not, disjoint by part, the same for ever."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from selftask.config.load import load_config, to_yaml
from selftask.data.loading.open_data import open_data
from selftask.data.source import Source
from selftask.data.subset import Subset, subset_of
from selftask.errors import BadImage, ConfigError, UserError
from selftask.registry import SOURCES


@pytest.fixture(scope="module")
def digits() -> Source:
    cls = SOURCES["digits"]
    source: Source = cls(cls.Config(size=8))
    return source


def rows(source: Source, value: Any) -> np.ndarray:
    subset = subset_of(source, value)
    assert isinstance(subset, Subset)
    return subset.rows


def test_sizes_order_and_images(digits: Source) -> None:
    assert subset_of(digits, None) is digits
    assert len(rows(digits, 0.1)) == 135
    assert len(rows(digits, 1e-4)) == 1, "none would be no subset"
    assert len(rows(digits, 100)) == 100
    assert rows(digits, 1.0).tolist() == list(range(1347))
    chosen = rows(digits, 100)
    assert np.all(np.diff(chosen) > 0)
    subset = pickle.loads(pickle.dumps(subset_of(digits, 100)))
    for index in (0, 57, 99):
        image, label = subset[index]
        assert np.array_equal(image, digits[int(chosen[index])][0])
        assert label == subset.labels[index] == digits.labels[chosen[index]]
        assert subset.path(index) == digits.path(int(chosen[index]))
    assert subset.describe() == (
        "100 of 1347 images of 8x8, 10 classes (handwritten digits, train) (subset: 100, seed 0)"
    )


class Named(Source):
    """Six images of the classes b and c, two without a label, the last two unreadable."""

    def __init__(self) -> None:
        self.labels = np.array([0, 1, -1, 0, 1, -1])
        self._classes = ["b", "c"]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.zeros((2, 2, 3), np.uint8), self.label_of(index)

    def path(self, index: int) -> str:
        return f"named {index}"

    def describe(self) -> str:
        return "named"

    def unreadable(self) -> dict[int, BadImage]:
        return {index: BadImage(self.path(index), "torn") for index in (4, 5)}


def test_new_numbers_and_unreadable_images_are_those_of_the_subset() -> None:
    for part in ({"part": 0, "of": 2}, {"part": 1, "of": 2}):
        subset = subset_of(Named(), part)
        assert isinstance(subset, Subset)
        chosen = subset.rows.tolist()
        assert {i: chosen[i] for i in subset.unreadable()} == {
            i: row for i, row in enumerate(chosen) if row in (4, 5)
        }
        subset.renumber(np.array([1, 3]), ["a", "b", "bc", "c"])
        expected = [[1, 3, -1, 1, 3, -1][row] for row in chosen]
        assert [subset[index][1] for index in range(3)] == subset.labels.tolist() == expected
        assert (subset.num_classes, subset.class_names()) == (4, ["a", "b", "bc", "c"])


def test_the_same_for_ever(digits: Source) -> None:
    """These numbers must never change: results were published with the subset they stand for."""
    assert rows(digits, 6).tolist() == PINNED
    assert rows(digits, {"count": 6, "seed": 1}).tolist() != PINNED


PINNED = [217, 294, 572, 643, 708, 918]


def test_smaller_lies_within_larger_and_no_place_is_preferred(digits: Source) -> None:
    assert set(rows(digits, 0.01)) < set(rows(digits, 0.1)) < set(rows(digits, 700))
    share = np.zeros(1347)
    for seed in range(400):
        share[rows(digits, {"fraction": 0.25, "seed": seed})] += 1
    # each image is in a binomial(400, 1/4) number of them: mean 100, deviation 8.7
    assert abs(share.std() / np.sqrt(400 * 0.25 * 0.75) - 1) < 0.1
    assert share.max() < 145 and share.min() > 60
    first = share[:673].mean() - share[674:].mean()
    assert abs(first) < 3


def test_by_class(digits: Source) -> None:
    of_each = np.bincount(digits.labels[rows(digits, {"count": 7, "per_class": True})])
    assert of_each.tolist() == [7] * 10
    shares = np.bincount(digits.labels[rows(digits, {"fraction": 0.2, "per_class": True})])
    assert shares.tolist() == [round(0.2 * n) for n in np.bincount(digits.labels)]
    with pytest.raises(UserError, match=r"count=999: there are \d+ images of class 0"):
        rows(digits, {"count": 999, "per_class": True})
    unlabeled = subset_of(digits, 50)
    unlabeled.labels = None
    with pytest.raises(UserError, match="needs labels, and these images have none"):
        rows(unlabeled, {"count": 1, "per_class": True})
    unlabeled.labels = np.array([-1] * 48 + [2, 4])  # images without a label are left out
    assert rows(unlabeled, {"per_class": True}).tolist() == [48, 49]
    assert subset_of(digits, {"count": 1}).num_classes == 10


@pytest.mark.parametrize("more", [{}, {"per_class": True}, {"seed": 3}])
def test_parts_are_disjoint_and_leave_nothing(digits: Source, more: dict[str, Any]) -> None:
    parts = [rows(digits, {"part": k, "of": 3, **more}) for k in range(3)]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1347))
    assert all(abs(len(part) - 1347 / 3) <= 10 * bool(more.get("per_class")) for part in parts)
    again = [rows(digits, {"part": k, "of": 3, **more}) for k in range(3)]
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    other = rows(digits, {"part": 0, "of": 3, **more, "seed": 11})
    assert not np.array_equal(other, parts[0]), "drawn by the seed"
    counts = np.stack([np.bincount(digits.labels[part], minlength=10) for part in parts])
    unequal = counts.max(axis=0) - counts.min(axis=0)  # of each class
    assert (unequal.max() <= 1) == bool(more.get("per_class")), "balanced, or drawn from all"
    half = rows(digits, {"part": 1, "of": 3, "fraction": 0.5, **more})
    assert set(half) < set(parts[1])
    assert abs(len(half) - len(parts[1]) / 2) <= 5


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (2000, r"data\.subset\.count=2000: there are 1347 images"),
        (0, r"data\.subset\.count=0: must be at least 1"),
        (1.5, r"data\.subset\.fraction=1\.5: more than 0 and at most 1"),
        (0.0, r"data\.subset\.fraction=0\.0"),
        ({"perclass": True}, r"unknown key 'data\.subset\.perclass'; did you mean 'per_class'"),
        ({"fraction": 0.1, "count": 3}, "only one of them"),
        ({"part": 1}, "one needs the other"),
        ({"part": 2, "of": 2}, r"part=2: the parts of 2 are 0 to 1"),
        ({"count": 2.5}, r"count=2\.5: expected a whole number"),
        ({"per_class": 1}, r"per_class=1: expected true or false"),
    ],
)
def test_impossible_subsets_are_refused(digits: Source, value: Any, match: str) -> None:
    with pytest.raises(UserError, match=match):
        subset_of(digits, value)


def test_subset_keys_of_a_config_split_one_set_without_overlap() -> None:
    """A training and a validation set out of one, from the command line and back from its yaml."""
    split = ["data.subset={part: 0, of: 2, seed: 5}", "data.val.split=train"]
    config = load_config("simclr/digits", [*split, "data.val.subset={part: 1, of: 2, seed: 5}"])
    train, val = open_data(config.data)[:2]
    assert val is not None
    names = {train.path(i) for i in range(len(train))}, {val.path(i) for i in range(len(val))}
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 1347
    assert "subset" not in load_config("simclr/digits", []).data.source.args
    with pytest.raises(ConfigError, match=r"data\.subset='10%': expected a number"):
        load_config("simclr/digits", ["data.subset=10%"])


def test_survives_its_yaml(tmp_path: Any) -> None:
    config = load_config("simclr/digits", ["data.subset=0.5", "data.val.subset=20"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(str(tmp_path / "config.yaml"), [])
    assert again.data == config.data
    assert [len(source) for source in open_data(again.data)[:2] if source] == [674, 20]
