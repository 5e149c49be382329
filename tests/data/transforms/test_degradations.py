"""Motion blur, zoom blur and JPEG by slow formulas and by Pillow."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import map_coordinates

from selftask.data.transforms.degradations import JPEG, MotionBlur, ZoomBlur

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
ROWS, COLUMNS = np.mgrid[:40, :56].astype(np.float64)


def sampled(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Values of the image at positions, interpolated linearly in float64."""
    planes = [
        map_coordinates(plane.astype(np.float64), [rows, columns], order=1, mode="mirror")
        for plane in np.moveaxis(IMAGE, 2, 0)
    ]
    return np.stack(planes, axis=2)


@pytest.mark.parametrize(("length", "degrees"), [(1, 10.0), (4, 0.0), (9, 25.0), (16, 90.0)])
def test_motion_is_the_mean_along_a_line(length: int, degrees: float) -> None:
    transform = MotionBlur(length=(length, length), degrees=degrees, p=1.0)
    draws = np.random.default_rng(3).random(3)
    angle = math.radians(degrees * (2 * draws[2] - 1))
    steps = np.arange(length) - (length - 1) / 2
    points = [(ROWS + s * math.sin(angle), COLUMNS + s * math.cos(angle)) for s in steps]
    expected = np.mean([sampled(*point) for point in points], axis=0)
    out = transform(IMAGE, np.random.default_rng(3))
    np.testing.assert_allclose(out, expected, atol=0.51)


def test_zoom_is_the_mean_of_enlargements() -> None:
    zooms = np.linspace(1, 1.3, 11)
    points = [(19.5 + (ROWS - 19.5) / zoom, 27.5 + (COLUMNS - 27.5) / zoom) for zoom in zooms]
    expected = np.mean([sampled(*point) for point in points], axis=0)
    out = ZoomBlur(zoom=(1.3, 1.3), p=1.0)(IMAGE, np.random.default_rng(0))
    difference = np.abs(out - expected)  # OpenCV rounds positions to 1/32 pixel
    assert difference.mean() < 0.6 and difference.max() < 6


@pytest.mark.parametrize("quality", [7, 25, 80])
def test_jpeg_is_that_of_pillow(quality: int) -> None:
    smooth = np.asarray(Image.fromarray(IMAGE).resize((96, 64), Image.Resampling.BICUBIC))
    out = JPEG(quality=(quality, quality), p=1.0)(smooth, np.random.default_rng(0))
    file = io.BytesIO()
    Image.fromarray(smooth).save(file, "JPEG", quality=quality)
    theirs = np.asarray(Image.open(file))
    assert np.abs(out - theirs.astype(float)).mean() < 1
    assert np.abs(out - smooth.astype(float)).mean() > 3  # it is no identity
    planes = JPEG(quality=(quality, quality), p=1.0)(smooth[..., :2], np.random.default_rng(0))
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(smooth[..., 1])).save(file, "JPEG", quality=quality)
    assert np.abs(planes[..., 1] - np.asarray(Image.open(file)).astype(float)).mean() < 1


def test_strengths_are_drawn_from_the_whole_range() -> None:
    draws = np.random.default_rng(0)
    motion = MotionBlur(length=(3, 9), p=1.0)
    sides = {len(motion.draw(draws, 8, 8)) for _ in range(100)}
    assert sides == {5, 7, 9, 11}, "two more than the line, or three"
    zooms = [ZoomBlur(zoom=(1.1, 1.5), p=1.0).draw(draws, 8, 8) for _ in range(100)]
    assert 1.1 <= min(zooms) < 1.12 and 1.48 < max(zooms) <= 1.5
    drawn = {JPEG(quality=(3, 5), p=1.0).draw(draws, 8, 8) for _ in range(60)}
    assert drawn == {3, 4, 5}
