"""Color spaces: Lab and its lightness by the formulas of the CIE, BGR by Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from selftask.random.views import draw_rng
from selftask.registry import TRANSFORMS

IMAGE = np.random.default_rng(0).integers(0, 256, (36, 48, 3), dtype=np.uint8)


def made(name: str, image: np.ndarray = IMAGE) -> np.ndarray:
    transform: Any = TRANSFORMS[name]()
    return np.asarray(transform(image, draw_rng(0, 0, 0, 0)))


def lab_of_the_cie() -> np.ndarray:
    """sRGB to XYZ (D65) to L*a*b*, in double precision."""
    rgb = IMAGE / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [
            [0.412453, 0.357580, 0.180423],
            [0.212671, 0.715160, 0.072169],
            [0.019334, 0.119193, 0.950227],
        ]
    )
    xyz = linear @ to_xyz.T / (0.950456, 1.0, 1.088754)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    lightness = 116 * f[..., 1] - 16
    return np.stack([lightness, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def test_lab_is_that_of_the_cie() -> None:
    """OpenCV's tables are within 2 levels."""
    expected = lab_of_the_cie() * (2.55, 1, 1) + (0, 128, 128)
    assert np.abs(made("lab").astype(float) - expected).max() < 2
    assert (made("lab", np.full((2, 2, 3), 100, dtype=np.uint8))[..., 1:] == 128).all()


def test_lightness_is_that_of_the_cie_in_three_channels() -> None:
    out = made("lightness")
    assert out.shape == IMAGE.shape and out.flags.c_contiguous
    assert np.abs(out - 2.55 * lab_of_the_cie()[..., :1]).max() < 2
    assert np.array_equal(out[..., 0], made("lab")[..., 0])


def test_bgr_is_the_order_of_channels_that_pillow_splits() -> None:
    red, green, blue = Image.fromarray(IMAGE).split()
    out = made("bgr")
    assert np.array_equal(out, np.asarray(Image.merge("RGB", (blue, green, red))))
    assert out.flags.c_contiguous
    assert np.array_equal(made("bgr", out), IMAGE)
