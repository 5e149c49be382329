"""Sources that are made: synthetic images, several sources as one, other labels."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from selftask.config.load import load_config
from selftask.data.loading.open_data import check_data, open_data
from selftask.errors import BadImage, ConfigError, UserError


def opened(*words: str) -> tuple[Any, Any]:
    config = load_config("simclr/digits", ["data.val=null", *words])
    return config, open_data(config.data).train


def test_synthetic_is_a_function_of_the_index() -> None:
    _, source = opened("data={name: synthetic, count: 30, size: 20, classes: 3, seed: 5}")
    _, again = opened("data={name: synthetic, count: 7, size: 20, classes: 3, seed: 5}")
    assert len(source) == 30
    assert source.num_classes == 3
    for index in range(7):
        image, label = source[index]
        assert image.shape == (20, 20, 3)
        assert image.dtype == np.uint8
        assert label == index % 3
        assert np.array_equal(image, again[index][0])
    assert not np.array_equal(source[0][0], source[3][0])
    means = [source[index][0].mean((0, 1)) for index in range(30)]
    apart = np.abs(np.subtract.outer(means, means)[:, range(3), :, range(3)]).max(0)
    same = np.equal.outer(source.labels, source.labels)
    assert apart[same].max() < apart[~same].min(), "a class has its color"
    with pytest.raises(IndexError):
        source[30]


def test_synthetic_from_the_short_form() -> None:
    config, source = opened("data=synthetic", "data.size=32", "data.count=600")
    assert source.describe() == "600 images of 32x32, 10 classes (synthetic)"
    assert check_data(config, source).num_samples == 600


def test_concat_is_one_index_space(tmp_path: Path) -> None:
    first = tiny.digits_file(tmp_path, "a.npz", 0, 48)
    second = tiny.digits_file(tmp_path, "b.npz", 100, 120)
    parts = f"[{{name: array, path: {first}}}, {{name: array, path: {second}}}]"
    config, source = opened(
        f"data={{name: concat, sources: {parts}, weights: [1, 3]}}", "train.batch_size=12"
    )
    alone = [opened(f"data={path}")[1] for path in (first, second)]
    assert len(source) == 48 + 3 * 20
    for index in range(len(source)):
        number, row = (0, index) if index < 48 else (1, (index - 48) % 20)
        image, label = source[index]
        assert np.array_equal(image, alone[number][row][0])
        assert label == alone[number][row][1] == source.labels[index]

    bad = BadImage("third", "torn")
    source.sources[1].unreadable = lambda: {3: bad}
    assert source.unreadable() == dict.fromkeys((51, 71, 91), bad), "each time it is shown"

    sampler = check_data(config, source)
    order = sampler.order(0).at(np.arange(sampler.num_samples))
    shown = collections.Counter(source.path(index) for index in order.tolist())
    times = dict.fromkeys(map(alone[0].path, range(48)), 1)
    times |= dict.fromkeys(map(alone[1].path, range(20)), 3)
    assert shown == times, "an epoch shows each image exactly as often as its weight says"


def test_concat_joins_classes_by_name(tmp_path: Path) -> None:
    from PIL import Image

    for folder, name in [("a", "cat"), ("a", "dog"), ("b", "dog"), ("b", "eel")]:
        (tmp_path / folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / name / "0.png")
    parts = ", ".join(f"{{name: folder, path: {tmp_path / folder}}}" for folder in "ab")
    _, source = opened(f"data={{name: concat, sources: [{parts}]}}")
    assert source.class_names() == ["cat", "dog", "eel"]
    assert source.labels.tolist() == [0, 1, 1, 2]


def test_concat_keeps_names_and_numbers_of_classes_apart(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cat", "1"):
        (tmp_path / "a" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "a" / name / "0.png")
    np.savez(tmp_path / "b.npz", images=np.zeros((3, 8, 8), np.uint8), labels=np.array([0, -1, 1]))
    parts = f"{{name: folder, path: {tmp_path}/a}}, {{name: array, path: {tmp_path}/b.npz}}"
    _, source = opened(f"data={{name: concat, sources: [{parts}]}}")
    assert source.class_names() == ["1", "cat", "0"]
    assert source.labels.tolist() == [0, 1, 2, -1, 0]
    assert source.num_classes == 3


def test_concat_refuses_in_words() -> None:
    with pytest.raises(ConfigError, match=r"weights: 1 numbers for 2 sources"):
        opened("data={name: concat, sources: [{name: digits}, {name: digits}], weights: [2]}")
    bands = "{name: synthetic, image_channels: 4}"
    with pytest.raises(UserError, match=r"data.sources.1: its images have 4 channels"):
        opened(f"data={{name: concat, sources: [{{name: digits}}, {bands}]}}")


@pytest.mark.parametrize(
    ("kind", "labels", "classes"), [("index", [0, 1, 2], 20), ("zero", [0, 0, 0], 1)]
)
def test_other_labels(kind: str, labels: list[int], classes: int) -> None:
    more = f"data.relabel={kind}"
    _, source = opened("data={name: synthetic, count: 20, size: 8}", more)
    assert [source[index][1] for index in range(3)] == labels
    assert source.labels[:3].tolist() == labels
    assert source.num_classes == classes


def test_no_labels() -> None:
    _, source = opened("data={name: synthetic, count: 20, size: 8}", "data.relabel=none")
    assert source.labels is None
    assert source[3][1] == -1
    assert source.num_classes == 0
