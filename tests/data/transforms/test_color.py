"""Colors and blur at the ends of their ranges."""

from __future__ import annotations

import numpy as np
import torchvision.transforms.functional as F
from PIL import Image

from selftask.data.transforms.color import GaussianBlur, adjust_contrast
from selftask.data.transforms.pipeline import Compose


def test_contrast_is_relative_to_the_rounded_mean() -> None:
    """As Pillow's; with a factor of 0 the mean alone remains."""
    for seed in range(10):
        image = np.random.default_rng(seed).integers(0, 256, (9, 7, 3), dtype=np.uint8)
        expected = np.asarray(F.adjust_contrast(Image.fromarray(image), 0.0))
        assert np.array_equal(adjust_contrast(image, 0.0), expected)
        gray = adjust_contrast(image[..., :1], 0.0)
        assert np.array_equal(gray, np.full_like(gray, round(image[..., 0].mean())))


def test_a_blur_of_no_width_changes_nothing() -> None:
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    blur = GaussianBlur(p=1.0, sigma=(0.0, 0.0))
    assert Compose([blur])(image, np.random.default_rng(0)) is image
