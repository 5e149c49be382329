"""Transforms against torchvision's (on Pillow images) for the same drawn parameters.

Theirs round down after each operation, ours to nearest: half a gray level for each, on average.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import torchvision.transforms.functional as F
from PIL import Image

from selftask.config.load import load_config
from selftask.data import kernel
from selftask.data.transforms.pipeline import Compose
from selftask.data.transforms.resampling import resize
from selftask.errors import ConfigError
from selftask.random.views import ViewDraws
from selftask.registry import TRANSFORMS

FALLING = "the first number must not be above the second"


def build(name: str, **args: Any) -> Any:
    return TRANSFORMS[name](**args)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def waves(height: int, width: int) -> np.ndarray:
    """Smooth but colorful, with the whole range of values."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [np.sin(x / 7) * np.cos(y / 5), np.cos(x / 11 + y / 6), np.sin(y / 9) * np.sin(x / 4)]
    return (np.stack(planes, -1) * 127.5 + 127.5).astype(np.uint8)


@pytest.fixture
def photo() -> np.ndarray:
    return waves(44, 60)


def pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image)


def assert_close(ours: np.ndarray, theirs: Image.Image, mean: float = 0.0, most: int = 0) -> None:
    """Within these gray levels."""
    assert ours.dtype == np.uint8
    assert ours.flags.c_contiguous
    difference = np.abs(ours.astype(int) - np.asarray(theirs).astype(int))
    assert difference.mean() <= mean, difference.mean()
    assert difference.max() <= most, difference.max()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("size", [16, 32, 100])
def test_random_resized_crop(photo: np.ndarray, interpolation: str, size: int) -> None:
    transform = build("random_resized_crop", size=size, interpolation=interpolation)
    for seed in range(10):
        left, top, right, bottom = transform.draw(rng(seed), 44, 60)
        expected = F.resized_crop(
            *(pillow(photo), top, left, bottom - top, right - left, [size, size]),
            interpolation=tv.InterpolationMode(interpolation),
        )
        limits = {"mean": 0.35, "most": 2} if interpolation != "nearest" else {}
        assert_close(transform(photo, rng(seed)), expected, **limits)


def test_nearest_neighbors_are_those_of_pillow() -> None:
    """For all pairs of sizes, one for rows and one for columns; distances are often equal."""
    for size in range(1, 65):
        for side in range(size, 65):
            image = np.stack(np.mgrid[:size, :side], axis=2).astype(np.uint8)
            expected = Image.fromarray(image, "LA").resize((size, side), Image.Resampling.NEAREST)
            assert np.array_equal(resize(image, side, size, "nearest"), expected), (size, side)


@pytest.mark.parametrize("size", [(60, 44), (300, 20), (10, 200), (1, 1)])
def test_random_resized_crop_draws_like_torchvision(size: tuple[int, int]) -> None:
    """Mean place, size and aspect ratio of 2000 boxes each; 5 standard errors."""
    transform, draws = build("random_resized_crop", size=8, scale=(0.2, 1.0)), rng()
    boxes = [transform.draw(draws, size[1], size[0]) for _ in range(2000)]
    ours = np.array(boxes, dtype=float)
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
def test_resize_and_center_crop(photo: np.ndarray, size: int) -> None:
    for image in (photo, np.ascontiguousarray(photo.transpose(1, 0, 2))):
        resized = F.resize(pillow(image), [size])
        assert_close(build("resize", size=size)(image, rng()), resized, mean=0.35, most=2)
        center = F.center_crop(pillow(image), [size])
        assert_close(build("center_crop", size=size)(image, rng()), center)


def test_a_line_is_resized_as_far_as_the_kernel_can() -> None:
    """A longer side of 70,000 pixels would be beyond its limit."""
    pipeline = Compose([build("resize", size=100), build("center_crop", size=80)])
    assert pipeline(np.full((700, 1, 3), 7, np.uint8), rng()).tolist() == [[[7] * 3] * 80] * 80


def test_random_crop(photo: np.ndarray) -> None:
    padded = np.asarray(F.pad(pillow(photo), [4]))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (32, 32), axis=(0, 1))
    seen = set()
    for seed in range(20):
        crop = build("random_crop", size=32, padding=4)(photo, rng(seed))
        actual = np.argwhere((windows == crop.transpose(2, 0, 1)).all(axis=(2, 3, 4)))
        assert len(actual) == 1
        seen.add(tuple(actual[0]))
    assert len(seen) > 15


def test_random_crop_of_a_smaller_image(photo: np.ndarray) -> None:
    expected = F.center_crop(pillow(photo), [70])
    assert_close(build("random_crop", size=70)(photo, rng()), expected)


def test_flips(photo: np.ndarray) -> None:
    for name, flip in (("horizontal_flip", F.hflip), ("vertical_flip", F.vflip)):
        assert_close(build(name, p=1.0)(photo, rng()), flip(pillow(photo)))
        assert build(name, p=0.0)(photo, rng()) is photo
        draws = rng()
        share = np.mean([build(name)(photo, draws) is not photo for _ in range(1000)])
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(1000)


@pytest.mark.parametrize("seed", range(5))
def test_random_affine(photo: np.ndarray, seed: int) -> None:
    """OpenCV knows positions to 1/32 of a pixel, here worth up to 3 gray levels, but for edges."""
    transform = build("random_affine", degrees=45, scale=(0.5, 1.1), translate=0.25)
    angle, scale, right, down = rng(seed).random(4)
    expected = F.affine(
        pillow(photo),
        angle=90 * angle - 45,
        translate=[60 * 0.25 * (2 * right - 1), 44 * 0.25 * (2 * down - 1)],
        scale=0.5 + 0.6 * scale,
        shear=[0.0],
        interpolation=tv.InterpolationMode.BILINEAR,
        fill=[0, 0, 0],
    )
    assert_close_inside(transform(photo, rng(seed)), expected)


def test_rotation(photo: np.ndarray) -> None:
    angle = 60 * rng().random() - 30
    expected = F.rotate(pillow(photo), angle, tv.InterpolationMode.BILINEAR)
    assert_close_inside(build("rotation", degrees=30)(photo, rng()), expected)


def assert_close_inside(ours: np.ndarray, theirs: Image.Image) -> None:
    """But for the border: theirs ends there abruptly, ours fades into the fill."""
    expected = np.asarray(theirs)
    inside = (expected.max(axis=2) > 0) & (ours.max(axis=2) > 0)
    difference = np.abs(ours.astype(int) - expected.astype(int))
    assert inside.mean() > 0.15
    assert np.quantile(difference[inside], 0.95) <= 3
    assert difference[inside].mean() < 2


@pytest.mark.parametrize(
    ("key", "reference"),
    [
        ("brightness", F.adjust_brightness),
        ("contrast", F.adjust_contrast),
        ("saturation", F.adjust_saturation),
    ],
)
@pytest.mark.parametrize("strength", [0.4, 0.8, 1.5])
def test_color_jitter_factors(photo: np.ndarray, key: str, reference: Any, strength: float) -> None:
    place = ["brightness", "contrast", "saturation"].index(key)
    for seed in range(5):
        draw = rng(seed).random(6)[1 + place]
        low = max(0.0, 1 - strength)
        expected = reference(pillow(photo), low + (1 + strength - low) * draw)
        ours = build("color_jitter", **{key: strength})(photo, rng(seed))
        assert_close(ours, expected, mean=0.6, most=2)


def test_color_jitter_hue(photo: np.ndarray) -> None:
    for seed in range(10):
        expected = F.adjust_hue(pillow(photo), 0.4 * rng(seed).random(6)[4] - 0.2)
        ours = build("color_jitter", hue=0.2)(photo, rng(seed))
        assert_close(ours, expected, mean=1.2, most=12)  # both know the hue in 8 bits only


def test_color_jitter_uses_every_order(photo: np.ndarray) -> None:
    jitter = build("color_jitter", brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, p=0.8)
    draws = rng()
    params = [jitter.draw(draws, 44, 60) for _ in range(3000)]
    untouched = np.mean([draw is None for draw in params])
    assert abs(untouched - 0.2) < 5 * math.sqrt(0.16 / 3000)
    orders = [draw.order for draw in params if draw is not None]
    counts = [orders.count(order) for order in itertools.permutations(range(4))]
    assert len(set(orders)) == 24
    assert sum((count - len(orders) / 24) ** 2 for count in counts) / (len(orders) / 24) < 60


def test_color_jitter_applies_in_the_drawn_order(photo: np.ndarray) -> None:
    jitter = build("color_jitter", brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2)
    functions = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    for seed in range(30):
        params = jitter.draw(rng(seed), 44, 60)
        expected = pillow(photo)
        for operation in params.order:
            expected = functions[operation](expected, params[operation])
        difference = np.abs(jitter(photo, rng(seed)).astype(int) - np.asarray(expected).astype(int))
        assert difference.mean() < 3, seed


COMPILED = pytest.param(
    True, marks=pytest.mark.skipif(not kernel.available(), reason="installed without a compiler")
)


@pytest.mark.parametrize("compiled", [COMPILED, False])
def test_the_whole_pipeline_is_close_to_torchvisions(compiled: bool) -> None:
    """Mean difference below 1.5 gray levels over 60 images, with the same draws."""
    images = [waves(90 + 7 * seed % 40, 120 + 11 * seed % 50) for seed in range(60)]
    crop, flip = build("random_resized_crop", size=64), build("horizontal_flip")
    jitter = build("color_jitter", brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, p=0.8)
    gray, solarize = build("grayscale", p=0.2), build("solarize", p=0.2)
    pipeline = Compose([crop, flip, jitter, gray, solarize])
    pipeline.compiled = compiled
    functions = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    draws, differences = ViewDraws(0), []
    for index, image in enumerate(images):
        ours = pipeline(image, draws.at(0, index, 0))
        generator = draws.at(0, index, 0)
        left, top, right, bottom = crop.draw(generator, *image.shape[:2])
        theirs = F.resized_crop(pillow(image), top, left, bottom - top, right - left, [64, 64])
        if flip.draw(generator, 64, 64) is not None:
            theirs = F.hflip(theirs)
        params = jitter.draw(generator, 64, 64)
        for operation in () if params is None else params.order:
            theirs = functions[operation](theirs, params[operation])
        if gray.draw(generator, 64, 64) is not None:
            theirs = F.rgb_to_grayscale(theirs, 3)
        if solarize.draw(generator, 64, 64) is not None:
            theirs = F.solarize(theirs, 128)
        differences.append(np.abs(ours.astype(int) - np.asarray(theirs).astype(int)).mean())
    assert np.mean(differences) < 1.5


@pytest.mark.skipif(not kernel.available(), reason="installed without a compiler")
def test_the_kernel_does_what_the_transforms_do() -> None:
    """Every transform that has a program, alone and between two that have none."""
    args: dict[str, dict[str, Any]] = {
        "random_resized_crop": {"size": 40},
        "resize": {"size": 30, "interpolation": "bicubic"},
        "horizontal_flip": {"p": 1.0},
        "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
        "grayscale": {"p": 1.0},
        "gaussian_blur": {"p": 1.0, "sigma": (0.5, 2.0)},
        "solarize": {"p": 1.0, "threshold": 256},
    }
    alone = [[build(name, **given)] for name, given in args.items()]
    flip = build("vertical_flip", p=1.0)
    between = [flip, *(transform for (transform,) in alone), lambda image, rng: 255 - image, flip]
    for transforms in (*alone, between):
        fused, plain = Compose(transforms), Compose(transforms)
        plain.compiled = False
        for seed in range(5):
            image = waves(50 + seed, 70)
            before = image.copy()
            difference = fused(image, rng(seed)).astype(int) - plain(image, rng(seed)).astype(int)
            assert np.abs(difference).mean() < 0.6, transforms
            assert np.abs(difference).max() <= 8, transforms
            assert np.array_equal(image, before)


def test_what_the_kernel_does_not_take_is_done_without_it() -> None:
    image = waves(20, 70_000)
    transforms = [
        build("gaussian_blur", p=1.0, sigma=(150.0, 150.0)),
        build("horizontal_flip", p=1.0),
    ]
    strip, small = Compose(transforms)(image, rng()), Compose(transforms)(waves(20, 30), rng())
    assert strip.shape == image.shape
    assert small.std(axis=(0, 1)).max() < 3 < waves(20, 30).std(axis=(0, 1)).min()


def test_grayscale_and_solarize(photo: np.ndarray) -> None:
    gray = F.rgb_to_grayscale(pillow(photo), 3)
    assert_close(build("grayscale", p=1.0)(photo, rng()), gray, mean=0.1, most=1)
    for threshold in (0, 1, 128, 255, 256):
        ours = build("solarize", p=1.0, threshold=threshold)(photo, rng())
        assert_close(ours, F.solarize(pillow(photo), threshold))
    assert build("grayscale", p=0.0)(photo, rng()) is photo
    assert build("solarize", p=0.0)(photo, rng()) is photo


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
def test_gaussian_blur_is_the_gaussian(photo: np.ndarray, sigma: float) -> None:
    before = photo.copy()
    ours = build("gaussian_blur", p=1.0, sigma=(sigma, sigma))(photo, rng())
    exact = F.gaussian_blur(torch.from_numpy(before.transpose(2, 0, 1)).double(), [21, 21], sigma)
    assert np.abs(ours - exact.numpy().transpose(1, 2, 0)).max() <= 1.5
    assert np.array_equal(photo, before)


def test_contrast_noise(photo: np.ndarray) -> None:
    transform = build("contrast_noise", contrast=(0.35, 1.0), offset=(0.0, 0.2), noise=0.05)
    factor, offset = rng().random(2)
    clean = photo * (0.35 + 0.65 * factor) + 255 * 0.2 * offset
    values = transform(photo, rng())
    assert values.dtype == np.uint8
    inside = ((clean > 50) & (clean < 205)).all(axis=2)
    noise = (values - clean)[inside]
    assert abs(noise.std() / (255 * 0.05) - 1) < 0.15
    assert np.abs(noise[:, 0] - noise[:, 1]).max() <= 1
    plain = build("contrast_noise", contrast=(0.3, 0.3), offset=(0.1, 0.1))(photo, rng())
    assert np.abs(plain - np.clip(photo * 0.3 + 25.5, 0, 255)).max() <= 0.501


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("rand_augment", {"magnitude": 31}, "magnitude"),
        ("normalize", {"mean": [0.5, 0.5, 0.5]}, "mean"),
    ],
)
def test_problems_name_the_key(name: str, args: dict[str, Any], key: str) -> None:
    problems = list(build(name, **args).problems({}))
    assert len(problems) == 1
    assert problems[0].startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("random_resized_crop", "size", 0, "must be at least 1"),
        ("horizontal_flip", "p", 2.0, "must be at most 1"),
        ("posterize", "bits", 9, "must be at most 8"),
        ("color_jitter", "contrast", -0.1, "must be at least 0"),
        ("color_jitter", "hue", 0.7, "must be at most 0.5"),
        ("color_jitter", "hue", "nan", "expected a number"),
        ("contrast_noise", "noise", -1.0, "must be at least 0"),
        ("random_affine", "translate", 1.5, "must be at most 1"),
        ("random_perspective", "distortion", 1.5, "must be at most 1"),
        ("elastic", "alpha", -1.0, "must be at least 0"),
        ("rand_augment", "num_ops", 0, "must be at least 1"),
        ("rand_augment", "num_bins", 1, "must be at least 2"),
        ("trivial_augment_wide", "num_bins", 1, "must be at least 2"),
        ("aug_mix", "severity", 11, "must be at most 10"),
        ("aug_mix", "num_chains", 0, "must be at least 1"),
        ("aug_mix", "depth", 0, "must be at least 1"),
        ("jigsaw", "grid", 1, "must be at least 2"),
        ("jigsaw", "tile", 0, "must be at least 1"),
        ("channel_drop", "fill", -1, "must be at least 0"),
        ("random_resized_crop", "scale", [0.5, 0.2], FALLING),
        ("random_resized_crop", "scale", [0.0, 0.2], "must be above 0"),
        ("random_resized_crop", "scale", [0.5, 1.2], "must be at most 1"),
        ("random_resized_crop", "ratio", [0.0, 1.0], "must be above 0"),
        ("gaussian_blur", "sigma", [2.0, 1.0], FALLING),
        ("contrast_noise", "contrast", [1.0, 0.5], FALLING),
        ("contrast_noise", "offset", [0.5, -0.5], FALLING),
        ("random_affine", "scale", [0.0, 1.0], "must be above 0"),
        ("random_erasing", "scale", [0.5, 0.1], FALLING),
        ("random_erasing", "ratio", [0.0, 1.0], "must be above 0"),
        ("random_erasing", "fill", 256, "must be at most 255"),
        ("cutout", "fill", [1, 2, 300], "must be at most 255"),
        ("gaussian_noise", "sigma", [0.2, 0.1], FALLING),
        ("salt_and_pepper", "amount", [0.0, 2.0], "must be at most 1"),
        ("aug_mix", "alpha", 0.0, "must be above 0"),
        ("sharpness", "factor", [1.0, 0.5], FALLING),
        ("random_shear", "x", 90.0, "must be below 90"),
        ("elastic", "sigma", 0.0, "must be above 0"),
    ],
)
def test_limits_name_the_key(name: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"transforms\.0\.{key}=.*: {message}"):
        load_config("simclr", [f"views.main.transforms=[{{name: {name}, {key}: {value}}}]"])
