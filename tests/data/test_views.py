"""Draws belong to (seed, epoch, sample, view)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as F

from selftask.config.schema import Component, ViewConfig
from selftask.data.transforms.normalize import STATISTICS
from selftask.data.transforms.pipeline import Normalizer, build_pipeline
from selftask.data.views import Views
from selftask.errors import ConfigError

CROP = Component(name="random_resized_crop", args={"size": 8})
SMALL = Component(name="random_resized_crop", args={"size": 6})
NORMALIZE = Component(name="normalize", args={})


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)


def test_views_come_in_order_and_size(image: np.ndarray) -> None:
    config = {
        "global": ViewConfig(count=2, transforms=[CROP, NORMALIZE]),
        "local": ViewConfig(count=3, transforms=[SMALL]),
    }
    views = Views(config)
    out = views(image, 0, 0, 5)
    assert [view.shape for view in out] == [(8, 8, 3)] * 2 + [(6, 6, 3)] * 3
    assert all(view.dtype == np.uint8 and view.flags.c_contiguous for view in out)
    assert not np.array_equal(out[0], out[1])
    again = pickle.loads(pickle.dumps(views))(image, 0, 0, 5)
    assert all(np.array_equal(a, b) for a, b in zip(out, again, strict=True))
    assert not np.array_equal(out[0], views(image, 0, 1, 5)[0])
    assert not np.array_equal(out[0], views(image, 1, 0, 5)[0])
    assert np.array_equal(out[0], views(image, 0, 0, 5)[0])


def test_each_crop_has_the_probabilities_of_its_group(image: np.ndarray) -> None:
    """Gray with probability 1 in the first view, 0.25 in the second, 0 in four small ones."""

    def group(crop: Component, count: int, p: float) -> ViewConfig:
        return ViewConfig(
            count=count, transforms=[crop, Component(name="grayscale", args={"p": p})]
        )

    views = Views({"a": group(CROP, 1, 1.0), "b": group(CROP, 1, 0.25), "c": group(SMALL, 4, 0.0)})
    gray = np.array(
        [[(v == v[..., :1]).all() for v in views(image, 0, 0, index)] for index in range(400)]
    )
    shares = gray.mean(axis=0)
    assert shares[0] == 1 and not shares[2:].any()
    assert abs(shares[1] - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 400)


def test_a_view_does_not_depend_on_the_others(image: np.ndarray) -> None:
    jitter = Component(name="color_jitter", args={"brightness": 0.5})
    plain = Views({"a": ViewConfig(count=2, transforms=[CROP])})
    longer = Views({"a": ViewConfig(transforms=[jitter, CROP]), "b": ViewConfig(transforms=[CROP])})
    assert np.array_equal(plain(image, 0, 0, 0)[1], longer(image, 0, 0, 0)[1])


@pytest.mark.parametrize("block", [1, 700, 1 << 17])
@pytest.mark.parametrize("shape", [(5, 7, 9, 3), (1, 1, 1, 1), (3, 4, 1, 5), (0, 2, 2, 3)])
def test_floats_are_those_of_numpy_to_the_last_bit(
    shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selftask.data.transforms.pipeline.BLOCK", block)
    rng = np.random.default_rng(0)
    scale, shift = rng.normal(0, 0.02, (2, shape[-1])).astype(np.float32)
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    expected = (pixels.astype(np.float32) * scale + shift).transpose(0, 3, 1, 2)
    to_float, given = Normalizer(scale, shift), torch.from_numpy(pixels)
    planes = given.permute(0, 3, 1, 2).float().contiguous()
    for _ in range(3):  # whatever the memory held before
        for values in (to_float(given), to_float.of_planes(planes)):
            assert np.array_equal(values, expected)
            assert values.is_contiguous(memory_format=torch.channels_last)
            assert values.data_ptr() % 64 == 0  # so that sums come out the same every time
    assert np.array_equal(planes.permute(0, 2, 3, 1), pixels)


@pytest.mark.parametrize("of", ["imagenet", "cifar10", "cifar100", "half"])
def test_batches_are_normalized_like_torchvision_does(image: np.ndarray, of: str) -> None:
    batch = np.stack([image, 255 - image])
    mean, std = STATISTICS[of]
    expected = torch.stack([F.normalize(F.to_tensor(pixels), mean, std) for pixels in batch])
    named = build_pipeline([Component(name="normalize", args={"stats": of})])
    listed = Component(name="normalize", args={"mean": list(mean), "std": list(std)})
    for pipeline in (named, build_pipeline([listed])):
        values = pipeline.to_float(torch.from_numpy(batch))
        assert values.is_contiguous(memory_format=torch.channels_last)
        assert (values - expected).abs().max() < 2e-6
    plain = build_pipeline([]).to_float(torch.from_numpy(batch))
    assert (plain - torch.stack([F.to_tensor(pixels) for pixels in batch])).abs().max() < 1e-7


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"eval\.transforms\[1\]: random_resized_crop .* after normalize"
    ):
        build_pipeline([NORMALIZE, CROP], key="eval.transforms")
    with pytest.raises(ConfigError, match="views: there is none"):
        Views({})
