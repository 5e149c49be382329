"""Views of shipped recipes against torchvision's pipelines: the same distribution.

Nothing is shared but the 2,000 images, so the statistics differ by their sampling errors, of which
five are allowed. Their rounding down (half a gray level an operation, at most 2 in all) is a third
of one such error of the mean.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torchvision.transforms as tv
from PIL import Image, ImageFilter

from selftask.config.load import load_config
from selftask.data.views import Views

NUM = 2000
SIZES = {"first": 32, "second": 32, "local": 16}
STATISTICS = [
    *(f"mean of {channel}" for channel in ("red", "green", "blue")),
    *(f"standard deviation of {channel}" for channel in ("red", "green", "blue")),
    "gray",
    "flipped",
    "gradient energy",
    "black or white",
]


@cache
def images() -> list[np.ndarray]:
    """Colored blots of 56x44 pixels with some noise, brighter to the right."""
    rng = np.random.default_rng(0)
    ramp = np.linspace(-60, 60, 56)[None, :, None]
    results = []
    for blots in rng.integers(40, 220, (NUM, 5, 6, 3), dtype=np.uint8):
        smooth = cv2.resize(blots, (56, 44), interpolation=cv2.INTER_CUBIC)
        noisy = smooth + ramp + rng.integers(-15, 16, (44, 56, 3))
        results.append(np.clip(noisy, 0, 255).astype(np.uint8))
    return results


def statistics(view: np.ndarray) -> list[float]:
    values = view.astype(np.float32)
    luma = values @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    lean = luma.mean(axis=0) @ (np.arange(luma.shape[1]) - (luma.shape[1] - 1) / 2)
    across, down = np.diff(luma, axis=1), np.diff(luma, axis=0)
    return [
        *values.mean(axis=(0, 1)),
        *values.std(axis=(0, 1)),
        float((view[..., 0] == view[..., 1]).all() and (view[..., 1] == view[..., 2]).all()),
        float(lean < 0),
        float((across**2).mean() + (down**2).mean()),
        float(((view == 0) | (view == 255)).mean()),
    ]


@cache
def ours(recipe: str, view: str) -> np.ndarray:
    """(NUM, statistics) of a shipped recipe's view, at a smaller size."""
    sizes = [f"views.{view}.transforms.0.size={SIZES[view]}", f"views.{view}.count=1"]
    config = load_config(recipe, ["data=no/such/folder", *sizes])
    views = Views({view: config.views[view]})
    seed = len(recipe) + len(view)  # other draws for each
    return np.array([statistics(views(image, seed, 0, i)[0]) for i, image in enumerate(images())])


def blurred(image: Image.Image) -> Image.Image:
    """The blur of MoCo's, DINO's and many others' code."""
    return image.filter(ImageFilter.GaussianBlur(torch.empty(1).uniform_(0.1, 2.0).item()))


@cache
def theirs(scale: tuple[float, float], view: str, blur: float, solarize: float) -> np.ndarray:
    """(NUM, statistics) of BYOL's and DINO's transforms as code for Pillow images writes them."""
    torch.manual_seed(0)
    pipeline = tv.Compose(
        [
            tv.RandomResizedCrop(SIZES[view], scale, interpolation=tv.InterpolationMode.BICUBIC),
            tv.RandomHorizontalFlip(p=0.5),
            tv.RandomApply([tv.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            tv.RandomGrayscale(p=0.2),
            tv.RandomApply([tv.Lambda(blurred)], p=blur),
            tv.RandomSolarize(128, p=solarize),
        ]
    )
    made: list[Any] = [pipeline(Image.fromarray(image)) for image in images()]
    return np.array([statistics(np.asarray(one)) for one in made])


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many standard errors the means of each statistic are apart."""
    error = np.sqrt((a.var(0) + b.var(0)) / NUM)
    return np.abs(a.mean(0) - b.mean(0)) / np.maximum(error, 1e-12)


BYOL, DINO = "byol/resnet50_imagenet", "dino/vit_small_imagenet"


@pytest.mark.parametrize(
    ("recipe", "view", "scale", "blur", "solarize"),
    [
        (BYOL, "second", (0.08, 1.0), 0.1, 0.2),  # all operations, each in some views
        pytest.param(BYOL, "first", (0.08, 1.0), 1.0, 0.0, marks=pytest.mark.slow),
        pytest.param(DINO, "first", (0.4, 1.0), 1.0, 0.0, marks=pytest.mark.slow),
        pytest.param(DINO, "second", (0.4, 1.0), 0.1, 0.2, marks=pytest.mark.slow),
        pytest.param(DINO, "local", (0.05, 0.4), 0.5, 0.0, marks=pytest.mark.slow),
    ],
)
def test_views_are_distributed_as_torchvisions(
    recipe: str, view: str, scale: tuple[float, float], blur: float, solarize: float
) -> None:
    apart = distances(ours(recipe, view), theirs(scale, view, blur, solarize))
    assert apart.max() < 5, dict(zip(STATISTICS, apart.round(1), strict=True))
    shares = ours(recipe, view).mean(0)
    error = 5 / math.sqrt(NUM)
    assert abs(shares[STATISTICS.index("gray")] - 0.2) < 0.4 * error
    assert abs(shares[STATISTICS.index("flipped")] - 0.5) < 0.5 * error


@pytest.mark.slow
def test_the_difference_of_two_views_would_be_seen() -> None:
    """Blur 0.1 in place of 1.0, no solarization, crops of other sizes: far beyond five errors."""
    first, second = ours(BYOL, "first"), ours(BYOL, "second")
    energy, bright = STATISTICS.index("gradient energy"), STATISTICS.index("mean of green")
    assert distances(first, theirs((0.08, 1.0), "second", 0.1, 0.2))[energy] > 10
    assert distances(second, theirs((0.08, 1.0), "first", 1.0, 0.0))[bright] > 5
    assert distances(ours(DINO, "local"), first)[energy] > 10
