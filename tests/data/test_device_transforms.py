"""Noise, holes, nested transforms, tones, warps, policies and pretext views by both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from both_engines import (
    HEIGHT,
    IMAGES,
    NEEDS_CUDA_BUILD,
    WIDTH,
    assert_close,
    by_cpu,
    by_device,
    on_an_imagined_gpu,
    part,
    pictures,
    views_of,
)

from selftask.config.schema import Component


def inner(name: str, **args: Any) -> dict[str, Any]:
    """A transform in the list of another one."""
    return {"name": name, **args}


CROP = inner("random_resized_crop", size=24)
TONES = [
    inner("solarize", p=0.5),
    inner("color_jitter", brightness=0.5, contrast=0.5, saturation=0.5, hue=0.2),
    inner("invert", p=0.5),
]
# name: transforms, and what the mean difference in grey levels may be
CASES: dict[str, tuple[list[Component], float]] = {
    "random_erasing": ([part("random_erasing", p=0.8)], 0.0),
    "colourful erasing": ([part("random_erasing", p=0.8, fill=[9, 99, 199])], 0.0),
    "noisy erasing": ([part("random_erasing", p=0.8, fill="noise")], 0.0),
    "erasing that rarely fits": ([part("random_erasing", p=1.0, scale=(0.9, 1.0))], 0.0),
    "cutout": ([part("cutout", length=15, num_holes=3, fill=128, p=0.7)], 0.0),
    "noisy cutout": ([part("cutout", length=20, num_holes=4, fill="noise")], 0.0),
    "gaussian_noise": ([part("gaussian_noise", p=0.7)], 0.0),
    "gray noise": ([part("gaussian_noise", gray=True, sigma=(0.2, 0.2))], 0.0),
    "salt_and_pepper": ([part("salt_and_pepper", amount=(0.0, 0.4), p=0.8)], 0.0),
    "random_apply": ([part("random_apply", transforms=TONES, p=0.6)], 1.0),
    "random_apply of noise": (
        [part("random_apply", transforms=[inner("gaussian_noise"), inner("cutout")], p=0.5)],
        0.0,
    ),
    "random_apply in random_apply": (
        [
            part(
                "random_apply",
                transforms=[inner("random_apply", transforms=TONES, p=0.5), inner("grayscale")],
                p=0.8,
            )
        ],
        1.0,
    ),
    "random_choice": (
        [part("random_choice", choices=[TONES, [], TONES[:1]], weights=[2.0, 1.0, 3.0])],
        1.0,
    ),
    "random_choice of crops": (
        [
            part(
                "random_choice",
                choices=[[CROP], [inner("resize", size=30), inner("center_crop", size=24)]],
            ),
            part("horizontal_flip"),
        ],
        0.25,
    ),
    "random_choice of sizes, crop": (
        [
            part("random_choice", choices=[[inner("resize", size=30)], [CROP], []]),
            part("random_resized_crop", size=20),
        ],
        0.5,
    ),
    "random_order": ([part("random_order", transforms=TONES)], 1.0),
    "random_order of noise": (
        [part("random_order", transforms=[inner("gaussian_noise", p=1.0), inner("cutout")])],
        0.0,
    ),
    "equalize": ([part("equalize", p=0.7)], 0.0),
    "autocontrast": ([part("autocontrast", p=0.7)], 0.0),
    "sharpness": ([part("sharpness", p=0.7)], 0.02),
    "random_perspective": ([part("random_perspective", p=0.7, fill=50)], 0.15),
    "nearest perspective": ([part("random_perspective", interpolation="nearest")], 0.5),
    "elastic": ([part("elastic", p=0.7)], 0.15),
    "bicubic elastic": ([part("elastic", interpolation="bicubic", fill=200)], 0.15),
}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_same_draws_same_views(name: str, dense: bool) -> None:
    transforms, most = CASES[name]
    config = views_of(transforms)
    images = list(pictures(IMAGES, HEIGHT, WIDTH))
    assert_close(config, by_device(config, images, dense=dense), by_cpu(config, images), most)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_draws_at_once_and_in_batches_of_any_size(name: str, dense: bool) -> None:
    """A picture's views do not depend on those beside it, nor on who draws."""
    config = views_of(CASES[name][0])
    images = list(pictures(16, HEIGHT, WIDTH))
    whole = by_device(config, images, dense=dense)
    for count in (1, 3, 16):
        some = by_device(config, images[:count], dense=dense, at_once=True)
        for one, other in zip(whole, some, strict=True):
            torch.testing.assert_close(one[:count], other, rtol=0, atol=1e-5)


RAGGED: dict[str, list[Component]] = {
    "random_apply": [part("random_apply", transforms=[inner("vertical_flip")]), part(**CROP)],
    "random_choice": [
        part("random_choice", choices=[[CROP, *TONES], [inner("random_crop", size=24)]])
    ],
    "random_order": [
        part("random_order", transforms=[inner("horizontal_flip"), inner("vertical_flip"), CROP]),
    ],
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", RAGGED)
def test_pictures_of_different_sizes(name: str, dense: bool, at_once: bool) -> None:
    config = views_of(RAGGED[name])
    sizes = [(40, 48), (17, 90), (64, 20), (33, 33), (9, 9), (40, 48), (12, 30)]
    images = [pictures(1, *size, seed=n)[0] for n, size in enumerate(sizes)]
    ours = by_device(config, images, dense=dense, at_once=at_once)
    assert_close(config, ours, by_cpu(config, images), 1.5)


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_asked_of_a_gpu(name: str) -> None:
    on_an_imagined_gpu(CASES[name][0], np.tile((HEIGHT, WIDTH), (4, 1)), dense=None)
