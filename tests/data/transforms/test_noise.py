"""Noise and holes: where, how large, how often, against torchvision and the papers' formulas."""

from __future__ import annotations

import math
import typing
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as tv

from selftask.config.config_class import config_class
from selftask.config.values.coerce import Mismatch, convert
from selftask.registry import TRANSFORMS

IMAGE = np.full((40, 60, 3), 128, dtype=np.uint8)


def build(name: str, **args: Any) -> Any:
    return TRANSFORMS[name](**args)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_random_erasing_draws_like_torchvision() -> None:
    """Mean place and size of 2000 rectangles each; 5 standard errors."""
    transform, draws = build("random_erasing", p=1.0), rng()
    holes = [hole for _ in range(2000) for hole in transform.draw(draws, 40, 60) or ()]
    ours = np.array([(h.top, h.left, h.bottom - h.top, h.right - h.left) for h in holes])
    torch.manual_seed(0)
    blank = torch.zeros(3, 40, 60)
    params = [
        tv.RandomErasing.get_params(blank, (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(2000)
    ]
    theirs = np.array([box for box in params if box != (0, 0, 40, 60)], dtype=float)
    error = np.sqrt(ours.var(0) / len(ours) + theirs.var(0) / len(theirs))
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5 * error).all()
    assert abs(len(ours) - len(theirs)) < 5 * math.sqrt(20)
    assert (ours >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= (40, 60)).all()


def test_random_erasing_overwrites_the_drawn_rectangle() -> None:
    for fill in (7, [1, 2, 3], "noise"):
        transform = build("random_erasing", p=1.0, fill=fill)
        (hole,) = transform.draw(rng(4), 40, 60)
        out = transform(IMAGE, rng(4))
        expected = IMAGE.copy()
        inside = np.s_[hole.top : hole.bottom, hole.left : hole.right]
        expected[inside] = out[inside] if fill == "noise" else fill
        assert np.array_equal(out, expected)
    values = out[inside].astype(float)
    assert values.size > 300
    assert abs(values.mean() - 127.5) < 5 * 73.9 / math.sqrt(values.size)
    assert abs(values.std() - 73.9) < 10
    assert (IMAGE == 128).all()


def test_random_erasing_of_what_is_too_small_does_nothing() -> None:
    """Nor is a whole side erased."""
    transform = build("random_erasing", p=1.0, scale=(1.0, 1.0))
    assert transform(IMAGE, rng()) is IMAGE
    transform = build("random_erasing", p=1.0, scale=(1 / 3, 1 / 3), ratio=(2.0, 2.0))
    assert transform(IMAGE, rng()) is IMAGE, "40 pixels high, 20 wide"
    transform = build("random_erasing", p=1.0, scale=(0.3, 0.3), ratio=(2.0, 2.0))
    (hole,) = transform.draw(rng(), 40, 60)
    assert (hole.bottom - hole.top, hole.right - hole.left) == (38, 19), "the ratio: height / width"
    for size in ((1, 1), (1, 30), (2, 2)):
        small = np.zeros((*size, 3), dtype=np.uint8)
        assert build("random_erasing", p=1.0)(small, rng()).shape == small.shape


def test_cutout_as_in_the_paper() -> None:
    """A square about a pixel, of which up to three quarters lie outside (DeVries and Taylor)."""
    transform, draws = build("cutout", length=16), rng()
    covered = np.zeros((40, 60))
    for _ in range(3000):
        covered += (transform(IMAGE, draws) == 0).all(axis=2)
    rows = np.array([min(y + 8, 39) - max(y - 7, 0) + 1 for y in range(40)])  # centers that do it
    columns = np.array([min(x + 8, 59) - max(x - 7, 0) + 1 for x in range(60)])
    expected = np.outer(rows / 40, columns / 60)
    error = np.sqrt(expected * (1 - expected) / 3000)
    assert (np.abs(covered / 3000 - expected) < 6 * error).all()
    (hole,) = build("cutout", length=3).draw(rng(), 1000, 1000)
    x, y = (1000 * rng().random(1 + 2))[1:].astype(int)
    assert hole[:4] == (x - 1, y - 1, x + 2, y + 2), "the pixel and its neighbors"
    holes = build("cutout", length=6, num_holes=5, fill=[9, 8, 7]).draw(rng(), 40, 60)
    assert len(holes) == 5
    assert all(1 <= hole.right - hole.left <= 6 for hole in holes)
    out = build("cutout", length=6, fill=[9, 8, 7])(IMAGE, rng())
    assert (out[(out != 128).any(axis=2)] == (9, 8, 7)).all()


@pytest.mark.parametrize("gray", [False, True])
def test_gaussian_noise(gray: bool) -> None:
    """Mean, spread and shares within 1 and 2 sigma of 3 * 40,000 values."""
    image = np.full((200, 200, 3), 128, dtype=np.uint8)
    out = build("gaussian_noise", sigma=(0.1, 0.1), p=1.0, gray=gray)(image, rng())
    noise = (out.astype(int) - 128) / 25.5
    n = noise.size / (3 if gray else 1)
    assert abs(noise.mean()) < 5 / math.sqrt(n)
    assert abs(noise.std() - 1) < 5 / math.sqrt(2 * n) + 0.002
    for sigmas, share in ((1, 0.6827), (2, 0.9545)):  # of gray levels: half of one more or less
        assert abs((np.abs(noise) <= sigmas).mean() - share) < 0.015
    same = (noise[..., 0] == noise[..., 1]).mean()
    assert (same == 1) if gray else (same < 0.1)
    channels = np.corrcoef(noise.reshape(-1, 3).T)
    assert np.allclose(channels, 1) if gray else np.abs(channels - np.eye(3)).max() < 0.03
    white = np.full((50, 50, 3), 255, dtype=np.uint8)
    assert build("gaussian_noise", sigma=(0.2, 0.2), p=1.0)(white, rng()).mean() > 200


def test_gaussian_noise_of_a_drawn_strength() -> None:
    transform, draws = build("gaussian_noise", sigma=(0.02, 0.2), p=1.0), rng()
    spreads = [transform.draw(draws, 30, 30).std() / 255 for _ in range(300)]
    assert 0.018 < min(spreads) < 0.03 and 0.19 < max(spreads) < 0.21
    assert abs(np.mean(spreads) - 0.11) < 5 * 0.18 / math.sqrt(12 * 300)


def test_salt_and_pepper() -> None:
    transform, draws = build("salt_and_pepper", amount=(0.1, 0.1), p=1.0), rng()
    out = np.stack([transform(IMAGE, draws) for _ in range(50)])
    white, black = (out == 255).all(axis=3).mean(), (out == 0).all(axis=3).mean()
    assert abs(white + black - (1 - math.exp(-0.1))) < 0.002  # some are drawn twice
    assert abs(white / black - 1) < 0.08
    assert ((out == 128).all(axis=3).mean() + white + black) == pytest.approx(1.0)
    assert np.array_equal(build("salt_and_pepper", amount=(0.0, 0.0), p=1.0)(IMAGE, rng()), IMAGE)
    three = build("salt_and_pepper").apply(IMAGE, np.arange(3))
    assert three[0, :4, 0].tolist() == [255, 255, 0, 128], "of an odd number more are white"


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("random_erasing", {"scale": (0.1, 0.2)}),
        ("cutout", {}),
        ("gaussian_noise", {}),
        ("salt_and_pepper", {}),
    ],
)
def test_p_is_the_share_of_changed_pictures(name: str, args: dict[str, Any]) -> None:
    for p in (0.0, 0.3, 1.0):
        transform, draws = build(name, **args, p=p), rng()
        share = np.mean([transform(IMAGE, draws) is not IMAGE for _ in range(400)])
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / 400)
    assert (IMAGE == 128).all()


def test_fill_may_be_a_level_a_colour_or_a_word() -> None:
    annotation = typing.get_type_hints(config_class(TRANSFORMS, "cutout"))["fill"]
    assert [convert(v, annotation) for v in (5, [1, 2, 3], "noise")] == [5, [1, 2, 3], "noise"]
    with pytest.raises(Mismatch, match="noise"):
        convert("nose", annotation)
