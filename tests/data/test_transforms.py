"""Transforms equal torchvision's for the same drawn parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import torchvision.transforms.functional as F
from PIL import Image

from selftask.registry import TRANSFORMS


def build(name: str, **args: Any) -> Any:
    return TRANSFORMS[name](**args)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def photo() -> Image.Image:
    """60x44, smooth but colourful, with the whole range of values."""
    y, x = np.mgrid[0:44, 0:60]
    waves = [np.sin(x / 7) * np.cos(y / 5), np.cos(x / 11 + y / 6), np.sin(y / 9) * np.sin(x / 4)]
    return Image.fromarray((np.stack(waves, -1) * 127.5 + 127.5).astype(np.uint8))


def assert_equal(a: Image.Image, b: Image.Image) -> None:
    assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_random_resized_crop(photo: Image.Image, interpolation: str) -> None:
    transform = build("random_resized_crop", size=32, interpolation=interpolation)
    for seed in range(10):
        left, top, right, bottom = transform.draw_box(photo.size, rng(seed))
        expected = F.resized_crop(
            *(photo, top, left, bottom - top, right - left, [32, 32]),
            interpolation=tv.InterpolationMode(interpolation),
        )
        assert_equal(transform(photo, rng(seed)), expected)


@pytest.mark.parametrize("size", [(60, 44), (300, 20), (10, 200), (1, 1)])
def test_random_resized_crop_draws_like_torchvision(size: tuple[int, int]) -> None:
    """Mean place, size and aspect ratio of 2000 boxes each; 5 standard errors."""
    transform, draws = build("random_resized_crop", size=8, scale=(0.2, 1.0)), rng()
    ours = np.array([transform.draw_box(size, draws) for _ in range(2000)], dtype=float)
    ours = np.stack([ours[:, 0], ours[:, 1], ours[:, 2] - ours[:, 0], ours[:, 3] - ours[:, 1]], 1)
    torch.manual_seed(0)
    blank = Image.new("L", size)
    boxes = [
        tv.RandomResizedCrop.get_params(blank, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(2000)
    ]
    theirs = np.array(boxes, dtype=float)[:, [1, 0, 3, 2]]
    error = np.sqrt((ours.var(0) + theirs.var(0)) / 2000)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) <= 5 * error + 1e-9).all()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= size[0]).all()
    assert (ours[:, 1] + ours[:, 3] <= size[1]).all()


@pytest.mark.parametrize("size", [16, 44, 100])
def test_resize_and_center_crop(photo: Image.Image, size: int) -> None:
    for image in (photo, photo.transpose(Image.Transpose.TRANSPOSE)):
        assert_equal(build("resize", size=size)(image, rng()), F.resize(image, [size]))
        assert_equal(build("center_crop", size=size)(image, rng()), F.center_crop(image, [size]))


def test_random_crop(photo: Image.Image) -> None:
    padded = np.asarray(F.pad(photo, [4]))
    seen = set()
    for seed in range(20):
        crop = np.asarray(build("random_crop", size=32, padding=4)(photo, rng(seed)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (32, 32), axis=(0, 1))
        found = np.argwhere((windows == crop.transpose(2, 0, 1)).all(axis=(2, 3, 4)))
        assert len(found) == 1
        seen.add(tuple(found[0]))
    assert len(seen) > 15


def test_flips(photo: Image.Image) -> None:
    for name, flip in (("horizontal_flip", F.hflip), ("vertical_flip", F.vflip)):
        assert_equal(build(name, p=1.0)(photo, rng()), flip(photo))
        assert_equal(build(name, p=0.0)(photo, rng()), photo)
        draws = rng()
        share = np.mean([build(name)(photo, draws) is not photo for _ in range(1000)])
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(1000)


@pytest.mark.parametrize("seed", range(5))
def test_random_affine(photo: Image.Image, seed: int) -> None:
    transform = build("random_affine", degrees=45, scale=(0.5, 1.1), shift=0.25)
    angle, scale, right, down = rng(seed).random(4)
    expected = F.affine(
        photo,
        angle=90 * angle - 45,
        translate=[60 * 0.25 * (2 * right - 1), 44 * 0.25 * (2 * down - 1)],
        scale=0.5 + 0.6 * scale,
        shear=[0.0],
        interpolation=tv.InterpolationMode.BILINEAR,
        fill=[0, 0, 0],
    )
    difference = np.abs(
        np.asarray(transform(photo, rng(seed)), float) - np.asarray(expected, float)
    )
    assert difference.max() <= 1  # the matrix is rounded differently


def test_rotation(photo: Image.Image) -> None:
    angle = 60 * rng().random() - 30
    expected = F.rotate(photo, angle, tv.InterpolationMode.BILINEAR)
    assert_equal(build("rotation", degrees=30)(photo, rng()), expected)


@pytest.mark.parametrize(
    ("key", "reference"),
    [
        ("brightness", F.adjust_brightness),
        ("contrast", F.adjust_contrast),
        ("saturation", F.adjust_saturation),
    ],
)
@pytest.mark.parametrize("strength", [0.4, 0.8, 1.5])
def test_color_jitter_factors(
    photo: Image.Image, key: str, reference: Any, strength: float
) -> None:
    place = ["brightness", "contrast", "saturation"].index(key)
    for seed in range(5):
        draw = rng(seed).random(5)[1 + place]
        low = max(0.0, 1 - strength)
        expected = reference(photo, low + (1 + strength - low) * draw)
        assert_equal(build("color_jitter", **{key: strength})(photo, rng(seed)), expected)


def test_color_jitter_hue(photo: Image.Image) -> None:
    for seed in range(10):
        expected = F.adjust_hue(photo, 0.4 * rng(seed).random(5)[4] - 0.2)
        assert_equal(build("color_jitter", hue=0.2)(photo, rng(seed)), expected)


def test_color_jitter_uses_every_order(photo: Image.Image) -> None:
    jitter = build("color_jitter", brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, p=0.8)
    draws = rng()
    untouched = np.mean([jitter(photo, draws) is photo for _ in range(300)])
    assert abs(untouched - 0.2) < 5 * math.sqrt(0.16 / 300)
    orders = {tuple(rng(seed).permutation(4)) for seed in range(300)}
    assert len(orders) == 24


def test_grayscale_and_solarize(photo: Image.Image) -> None:
    assert_equal(build("grayscale", p=1.0)(photo, rng()), F.rgb_to_grayscale(photo, 3))
    assert_equal(build("solarize", p=1.0)(photo, rng()), F.solarize(photo, 128))
    assert build("grayscale", p=0.0)(photo, rng()) is photo
    assert build("solarize", p=0.0)(photo, rng()) is photo


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_gaussian_blur_is_close_to_the_gaussian(photo: Image.Image, sigma: float) -> None:
    ours = np.asarray(build("gaussian_blur", p=1.0, sigma=(sigma, sigma))(photo, rng()), float)
    exact = np.asarray(F.gaussian_blur(photo, [21, 21], [sigma, sigma]), float)
    assert np.abs(ours - exact)[6:-6, 6:-6].max() <= 3  # borders are extended differently


def test_contrast_noise(photo: Image.Image) -> None:
    transform = build("contrast_noise", contrast=(0.35, 1.0), offset=(0.0, 0.2), noise=0.05)
    factor, offset = rng().random(2)
    clean = (
        np.asarray(photo, float).transpose(2, 0, 1) / 255 * (0.35 + 0.65 * factor) + 0.2 * offset
    )
    values = transform(photo, rng())
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() <= 1
    inside = ((clean > 0.2) & (clean < 0.8)).all(axis=0)
    noise = (values - clean)[:, inside]
    assert abs(noise.std() / 0.05 - 1) < 0.15
    assert np.abs(noise[0] - noise[1]).max() < 1e-6


@pytest.mark.parametrize("of", ["imagenet", "cifar10", "cifar100", "half"])
def test_normalize(photo: Image.Image, of: str) -> None:
    from selftask.data.transforms.normalize import STATISTICS, to_float

    expected = F.normalize(F.to_tensor(photo), *map(list, STATISTICS[of])).numpy()
    for image in (photo, to_float(photo)):
        assert np.abs(build("normalize", of=of)(image, rng()) - expected).max() < 2e-6
    own = build("normalize", mean=[0.5] * 3, std=[0.5] * 3)(photo, rng())
    assert np.array_equal(own, build("normalize", of="half")(photo, rng()))


def test_normalize_leaves_its_input_alone(photo: Image.Image) -> None:
    values = np.ones((3, 4, 4), dtype=np.float32)
    build("normalize")(values, rng())
    assert (values == 1).all()


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("random_resized_crop", {"size": 0}, "size"),
        ("random_resized_crop", {"size": 8, "scale": (0.5, 0.2)}, "scale"),
        ("horizontal_flip", {"p": 2.0}, "p"),
        ("color_jitter", {"hue": 0.7}, "hue"),
        ("gaussian_blur", {"sigma": (2.0, 1.0)}, "sigma"),
        ("random_affine", {"scale": (0.0, 1.0)}, "scale"),
        ("normalize", {"mean": [0.5, 0.5, 0.5]}, "mean"),
        ("contrast_noise", {"noise": -1.0}, "noise"),
    ],
)
def test_problems_name_the_key(name: str, args: dict[str, Any], key: str) -> None:
    problems = list(build(name, **args).problems({}))
    assert len(problems) == 1
    assert problems[0].startswith(f"{key}: ")
