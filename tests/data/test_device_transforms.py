"""Noise, holes, nested transforms, tones, warps, policies and pretext views by both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from both_engines import (
    HEIGHT,
    IMAGES,
    WIDTH,
    assert_close,
    by_cpu,
    by_device,
    on_an_imagined_device,
    part,
    smooth_images,
    views_of,
)

from selftask.config.schema import Component
from selftask.data.transforms.transform import Transform
from selftask.registry import BATCHED_TRANSFORMS, TRANSFORMS, Registry


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
    "random_perspective": ([part("random_perspective", p=0.7, fill=50)], 0.1),
    "nearest perspective": ([part("random_perspective", interpolation="nearest")], 0.5),
    "elastic": ([part("elastic", p=0.7)], 0.1),
    "rand_augment": ([part("rand_augment")], 0.2),
    "strong rand_augment": (
        [part("rand_augment", num_ops=3, magnitude=28, interpolation="bilinear", fill=99)],
        0.1,
    ),
    "trivial_augment_wide": ([part("trivial_augment_wide")], 0.2),
    "auto_augment": ([part("auto_augment")], 0.2),
    "auto_augment of cifar10": ([part("auto_augment", policy="cifar10")], 0.2),
    "auto_augment of svhn": ([part("auto_augment", policy="svhn")], 0.2),
    "aug_mix": ([part("aug_mix")], 0.1),
    "severe aug_mix": (
        [part("aug_mix", severity=10, num_chains=2, depth=2, all_ops=False)],
        0.1,
    ),
    "rotate_90, crop": ([part("rotate_90"), part("random_resized_crop", size=20)], 0.25),
    "rotate_90 of squares": (
        [part("center_crop", size=30), part("rotate_90", k=[0, 1, 3])],
        0.0,
    ),
    "jigsaw": ([part("jigsaw", tile=10)], 0.0),
    "jigsaw of whole cells": ([part("jigsaw", grid=4)], 0.0),
    "lab": ([part("lab")], 0.5),
    "lightness": ([part("lightness"), part("invert", p=0.5)], 0.5),
    "bgr": ([part("bgr"), part("solarize", p=0.5)], 0.0),
    "channel_drop": ([part("channel_drop", fill=77)], 0.0),
    "two channels": ([part("channel_drop", keep=2)], 0.0),
    "bicubic elastic": ([part("elastic", interpolation="bicubic", fill=200)], 0.1),
}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_same_draws_same_views(name: str, dense: bool) -> None:
    transforms, most = CASES[name]
    config = views_of(transforms)
    images = list(smooth_images(IMAGES, HEIGHT, WIDTH))
    assert_close(config, by_device(config, images, dense=dense), by_cpu(config, images), most)


@pytest.mark.parametrize("name", CASES)
def test_draws_at_once_and_in_batches_of_any_size(name: str) -> None:
    """A image's views do not depend on those beside it, nor on who draws."""
    config = views_of(CASES[name][0])
    images = list(smooth_images(16, HEIGHT, WIDTH))
    whole = by_device(config, images, dense=False)
    for count in (1, 3, 16):
        some = by_device(config, images[:count], dense=count == 3, at_once=True)
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
    images = [smooth_images(1, *size, seed=n)[0] for n, size in enumerate(sizes)]
    ours = by_device(config, images, dense=dense, at_once=at_once)
    assert_close(config, ours, by_cpu(config, images), 1.5)


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("dense", [False, True])
def test_pictures_of_other_channels(channels: int, dense: bool) -> None:
    chain = [
        part("random_resized_crop", size=32),
        part("rotation", degrees=30),
        part("gaussian_blur", p=1.0),
        part("color_jitter", brightness=0.4, contrast=0.4),
        part("random_apply", transforms=[inner("horizontal_flip"), inner("solarize")]),
        part("equalize"),
        part("autocontrast"),
        part("sharpness"),
        part("random_erasing", fill="noise"),
        part("gaussian_noise"),
        part("salt_and_pepper"),
        part("jigsaw", grid=2),
    ]
    if channels > 1:
        chain.append(part("channel_drop"))
    config = views_of(chain)
    images = list(smooth_images(6, HEIGHT, WIDTH, channels=channels))
    assert_close(config, by_device(config, images, dense=dense), by_cpu(config, images), 1.5)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", ["equalize", "autocontrast", "sharpness", "auto_augment", "lab"])
def test_pictures_of_few_pixels_or_values(name: str, dense: bool) -> None:
    config = views_of([part(name, **({} if name in ("auto_augment", "lab") else {"p": 1.0}))])
    flat = np.full((40, 40, 3), 77, np.uint8)
    two = np.where(np.arange(40)[:, None, None] < 30, flat, np.uint8([80, 76, 255]))
    for images in ([flat, two], [flat[:1, :1]], [two[29:31, :9]]):
        same = [np.ascontiguousarray(image) for image in images]
        assert_close(config, by_device(config, same, dense=dense), by_cpu(config, same), 0.5)


class Brighter(Transform):
    """A user's transform with a form for batches."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> float:
        return float(rng.random())

    def apply(self, image: np.ndarray, params: float) -> np.ndarray:
        return np.rint(255 - image * params).astype(np.uint8)

    def on_batch(self, images: torch.Tensor, params: list[float | None]) -> torch.Tensor:
        changes = zip(images, params, strict=True)
        return torch.stack([image if d is None else 255 - image * d for image, d in changes])


@pytest.mark.parametrize("dense", [False, True])
def test_a_users_transform_within_another(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFORMS._registered, "brighter", Brighter)
    nested = [part("random_apply", transforms=[inner("invert"), inner("brighter")], p=0.6)]
    config, images = views_of(nested), list(smooth_images(9, 12, 12))
    for at_once in (False, True):
        ours = by_device(config, images, dense=dense, at_once=at_once)
        assert_close(config, ours, by_cpu(config, images), 0.1)


def test_every_transform_has_a_form() -> None:
    built_in = Registry("transform", "selftask.data.transforms").names()
    assert set(built_in) - {"normalize", "custom"} == set(BATCHED_TRANSFORMS.names())


ON_A_DEVICE = [  # one for each formula: imagining takes its time
    *(
        "noisy erasing",
        "gray noise",
        "salt_and_pepper",
        "random_choice",
        "equalize",
        "autocontrast",
    ),
    *("sharpness", "random_perspective", "elastic", "trivial_augment_wide", "rotate_90, crop"),
    *("jigsaw", "lab", "lightness", "bgr", "channel_drop"),
]


@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_nothing_is_asked_of_a_device(name: str) -> None:
    on_an_imagined_device(CASES[name][0], np.tile((HEIGHT, WIDTH), (4, 1)), dense=None)
