"""Sprite sheets: content, size, names."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from selftask.report.images import (
    embedding_map,
    neighbors,
    patch_maps,
    reconstructions,
    sprite,
    views,
)
from selftask.report.images.sprite import Sprite, short_names, thumbnail


def decoded(css: str) -> np.ndarray:
    """The pixels of a sheet's data URI."""
    match = re.search(r"base64,([^)]+)\)", css)
    assert match is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(match[1]))).convert("RGB"))


def test_images_of_a_page_stay_below_3_mb() -> None:
    budgets = [
        module.BUDGET for module in (embedding_map, neighbors, patch_maps, reconstructions, views)
    ]
    assert sum(budgets) < 3_000_000


@pytest.mark.parametrize("budget", [160_000, 40_000])
def test_noise_fits_into_the_budget(budget: int) -> None:
    """Noise is what compresses worst."""
    draws = np.random.default_rng(0)
    sheet = Sprite("spot", 64, budget)
    for _ in range(embedding_map.MOST_POINTS // 40):
        sheet.add(draws.integers(0, 256, (64, 64, 3)).astype(np.uint8))
    assert budget / 10 < len(sheet.css()) < budget + 200


def test_more_than_the_budget_is_an_error() -> None:
    image = np.random.default_rng(0).integers(0, 256, (400, 400, 3)).astype(np.uint8)
    with pytest.raises(ValueError, match="400"):
        sprite.encode(image, 100)


def test_a_tile_shows_its_image() -> None:
    """Each in one color: no tile bleeds into another, and equal ones share one."""
    draws = np.random.default_rng(1)
    colors = draws.integers(0, 256, (70, 3)).astype(np.uint8)
    sheet = Sprite("tile", 48, 500_000)
    numbers = [sheet.add(np.full((30 + row % 40, 60, 3), c)) for row, c in enumerate(colors)]
    assert numbers == list(range(70))
    assert sheet.add(np.full((30, 60, 3), colors[0])) == 0 and len(sheet) == 70
    pixels = decoded(sheet.css())
    for number, color in zip(numbers, colors, strict=True):
        left, top, width, height = sheet.tile(number)
        shown = pixels[top : top + height, left : left + width].astype(int)
        assert np.abs(shown - color).max() < 30
        assert np.abs(shown.mean(axis=(0, 1)) - color).max() < 8


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((32, 32, 3), (96, 96)),
        ((100, 200, 3), (48, 96)),
        ((500, 20, 1), (96, 4)),
        ((2000, 1, 3), (96, 1)),
        ((60, 90, 2), (60, 90)),
        ((7, 7, 13), (91, 91)),
    ],
)
def test_any_image_has_a_thumbnail(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    small = thumbnail(image, 96)
    assert small.shape == (*size, 3) and small.dtype == np.uint8
    if shape[2] < 3:
        assert np.array_equal(small[..., 0], small[..., 2]), "gray"


def test_names_are_short_and_printable() -> None:
    assert short_names(["/a/b/cat/1.jpg", "/a/b/dog/1.jpg"]) == ["cat/1.jpg", "dog/1.jpg"]
    assert short_names(["/a/b/1.jpg", "/a/b/2\n.jpg"]) == ["1.jpg", "2?.jpg"]
    assert short_names(["/x/d.csv:4", "/x/d.csv:51"]) == ["4", "51"]
    assert short_names(["/x/y.png"]) == ["/x/y.png"]
    assert short_names(["\udcff.png", "b"]) == ["?.png", "b"]
