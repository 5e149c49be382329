"""Tones and warps against torchvision's (on Pillow images) for the same drawn parameters."""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import torchvision.transforms.functional as F
from PIL import Image

from selftask.data.transforms import tones
from selftask.registry import TRANSFORMS


def build(name: str, **args: Any) -> Any:
    return TRANSFORMS[name](**args)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image)


def _waves() -> np.ndarray:
    """Smooth but colorful, with a part of the range of values only; 44x60."""
    y, x = np.mgrid[0:44, 0:60]
    planes = [np.sin(x / 7) * np.cos(y / 5), np.cos(x / 11 + y / 6), np.sin(y / 9) * np.sin(x / 4)]
    return (np.stack(planes, -1) * (90, 50, 120) + (110, 180, 125)).astype(np.uint8)


def _two_values() -> np.ndarray:
    image = np.full((20, 30, 3), 77, dtype=np.uint8)
    image[5, 5:9] = 80
    return image


PICTURES = {
    "waves": _waves(),
    "noise": rng(1).integers(0, 256, (31, 45, 3), dtype=np.uint8),
    "dark": rng(2).integers(0, 9, (31, 45, 3), dtype=np.uint8),
    "one value": np.full((20, 30, 3), 77, dtype=np.uint8),
    "two values": _two_values(),
    "a pixel": np.array([[[3, 200, 90]]], dtype=np.uint8),
}
every_picture = pytest.mark.parametrize("image", PICTURES.values(), ids=PICTURES)


def assert_same(ours: np.ndarray, theirs: Any, mean: float = 0.0, most: int = 0) -> None:
    """Within these gray levels."""
    assert ours.dtype == np.uint8
    assert ours.flags.c_contiguous
    difference = np.abs(ours.astype(int) - np.asarray(theirs).astype(int))
    assert difference.mean() <= mean, difference.mean()
    assert difference.max() <= most, difference.max()


@every_picture
def test_tables_are_those_of_pillow(image: np.ndarray) -> None:
    for bits in range(1, 9):
        ours = build("posterize", bits=bits, p=1.0)(image, rng())
        assert_same(ours, F.posterize(pillow(image), bits))
    assert_same(build("invert", p=1.0)(image, rng()), F.invert(pillow(image)))
    assert_same(build("equalize", p=1.0)(image, rng()), F.equalize(pillow(image)))
    assert_same(build("autocontrast", p=1.0)(image, rng()), F.autocontrast(pillow(image)))
    for threshold in (0.0, 8.5, 76.5, 127.5, 255.0, 256.0):
        assert_same(tones.solarize(image, threshold), F.solarize(pillow(image), threshold))


@every_picture
def test_sharpness(image: np.ndarray) -> None:
    for seed in range(8):
        factor = 3 * rng(seed).random(2)[1]
        ours = build("sharpness", factor=(0.0, 3.0), p=1.0)(image, rng(seed))
        assert_same(ours, F.adjust_sharpness(pillow(image), factor), mean=1.1, most=3)


def test_random_shear() -> None:
    image = PICTURES["waves"]
    for seed in range(5):
        transform = build("random_shear", x=25, y=15)
        x, y = ((2 * rng(seed).random(2) - 1) * (25, 15)).tolist()
        expected = F.affine(
            pillow(image), 0.0, [0, 0], 1.0, [x, y], tv.InterpolationMode.BILINEAR, fill=[0, 0, 0]
        )
        assert_close_inside(transform(image, rng(seed)), expected)


def test_random_perspective() -> None:
    image = PICTURES["waves"]
    for seed in range(8):
        transform = build("random_perspective", distortion=0.6, p=1.0)
        ends = transform.draw(rng(seed), 44, 60)
        starts = [[0, 0], [59, 0], [59, 43], [0, 43]]
        expected = F.perspective(pillow(image), starts, ends.astype(int).tolist(), fill=0)
        assert_close_inside(transform(image, rng(seed)), expected)


def test_random_perspective_draws_like_torchvision() -> None:
    """Mean and spread of the 8 coordinates of 2000 draws each; 5 standard errors."""
    draws = rng()
    transform = build("random_perspective", distortion=0.5, p=1.0)
    ours = np.array([transform.draw(draws, 41, 64) for _ in range(2000)]).reshape(2000, 8)
    torch.manual_seed(0)
    params = [tv.RandomPerspective.get_params(64, 41, 0.5)[1] for _ in range(2000)]
    theirs = np.array(params, dtype=float).reshape(2000, 8)
    error = np.sqrt((ours.var(0) + theirs.var(0)) / 2000)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5 * error).all()
    assert (ours.min(0) == theirs.min(0)).all()
    assert (ours.max(0) == theirs.max(0)).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (2, 2), (8, 8)])
def test_perspective_of_few_pixels_and_crossed_corners(size: tuple[int, int]) -> None:
    image = rng().integers(0, 256, (*size, 3), dtype=np.uint8)
    transform = build("random_perspective", distortion=1.0, p=1.0)
    for seed in range(50):
        assert transform(image, rng(seed)).shape == image.shape


def assert_close_inside(ours: np.ndarray, theirs: Image.Image) -> None:
    """But for the border: theirs ends there abruptly, ours fades into the fill."""
    expected = np.asarray(theirs)
    inside = (expected.max(axis=2) > 0) & (ours.max(axis=2) > 0)
    inside = cv2.erode(inside.astype(np.uint8), np.ones((3, 3))) > 0
    difference = np.abs(ours.astype(int) - expected.astype(int))
    assert inside.mean() > 0.15
    assert np.mean((expected.max(axis=2) > 0) != (ours.max(axis=2) > 0)) < 0.06
    assert np.quantile(difference[inside], 0.95) <= 3
    assert difference[inside].mean() < 1


def test_elastic_moves_pixels_by_what_was_drawn() -> None:
    image = PICTURES["waves"]
    transform = build("elastic", alpha=60.0, sigma=3.0, p=1.0)
    params = transform.draw(rng(), 44, 60)
    grid = torch.from_numpy(params.transpose(1, 2, 0) / (30, 22)).float()[None]  # half a side is 1
    expected = F.elastic_transform(pillow(image), grid, tv.InterpolationMode.BILINEAR)
    assert np.abs(params).max() > 3
    assert_close_inside(transform.apply(image, params), expected)


@pytest.mark.parametrize("name", ["random_perspective", "elastic", "random_affine"])
def test_interpolation_and_fill_are_those_of_the_config(name: str) -> None:
    """The nearest pixel of two levels has one of them, or a third outside."""
    image = np.where(PICTURES["waves"][..., :1] > 128, [[[200, 210, 220]]], 50).astype(np.uint8)
    args = {"degrees": 45.0} if name == "random_affine" else {"p": 1.0}
    transform = build(name, **args, interpolation="nearest", fill=7)
    levels = [{50, 200 + 10 * channel, 7} for channel in range(3)]
    assert [{*plane} for plane in transform(image, rng()).reshape(-1, 3).T.tolist()] == levels
    smooth = build(name, **args, interpolation="bilinear", fill=7)(image, rng())
    assert len(np.unique(smooth)) > 20


@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torchvision 0.25 exchanges the sides of an oblong image"
)
def test_elastic_draws_like_torchvision() -> None:
    """Spread and smoothness of the displacements, mean of 60 fields each; 5 standard errors."""
    transform, draws = build("elastic", alpha=50.0, sigma=5.0, p=1.0), rng()
    torch.manual_seed(0)

    def theirs() -> np.ndarray:
        grid = tv.ElasticTransform.get_params([50.0, 50.0], [5.0, 5.0], [44, 60])
        return (grid[0].numpy() * (30, 22)).transpose(2, 0, 1)

    def statistics(field: np.ndarray) -> list[float]:
        return [*field.std((1, 2)), *np.abs(np.diff(field, axis=2)).mean((1, 2)), field.max()]

    a = np.array([statistics(transform.draw(draws, 44, 60)) for _ in range(60)])
    b = np.array([statistics(theirs()) for _ in range(60)])
    error = np.sqrt((a.var(0) + b.var(0)) / 60)
    assert (np.abs(a.mean(0) - b.mean(0)) < 5 * error).all()


def test_lighting_is_that_of_fb_resnet_torch() -> None:
    """``rgb = eigvec:cmul(alpha):cmul(eigval):sum(2)``, alpha from N(0, std); values in [0, 1]."""
    vectors = np.array(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
    )
    values = np.array([0.2175, 0.0188, 0.0045])
    image = PICTURES["waves"]
    transform, alpha = build("lighting", std=0.5), 0.5 * rng().standard_normal(3)
    shift = (vectors * alpha[None] * values[None]).sum(1)
    expected = np.clip(np.rint((image / 255 + shift) * 255), 0, 255)
    ours = transform(image, rng())
    assert np.array_equal(ours, expected) and (ours != image).any()
    draws = rng(1)
    shifts = np.array([transform.draw(draws, 4, 4) for _ in range(20_000)]) / 255
    covariance = vectors @ np.diag((0.5 * values) ** 2) @ vectors.T
    assert np.allclose(np.cov(shifts.T), covariance, atol=1e-4)
    assert tuple(transform.numbers(None)) == (0.0, 0.0, 0.0)
    (problem,) = transform.channel_problems(1)
    assert "leave lighting out" in problem


WITH_P = {
    "posterize": {},
    "equalize": {},
    "autocontrast": {},
    "invert": {},
    "sharpness": {"factor": (2.0, 2.0)},
    "random_perspective": {},
    "elastic": {},
}


@pytest.mark.parametrize("name", WITH_P)
def test_p_is_the_share_of_changed_pictures(name: str) -> None:
    image = PICTURES["waves"][:12, :12].copy()
    for p in (0.0, 0.3, 1.0):
        transform, draws = build(name, **WITH_P[name], p=p), rng()
        share = np.mean([transform(image, draws) is not image for _ in range(400)])
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / 400)
    assert np.array_equal(image, PICTURES["waves"][:12, :12])
