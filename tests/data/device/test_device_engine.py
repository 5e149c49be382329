"""The device engine against the cpu engine: the same draws, and the same views within rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.both_engines import (
    HEIGHT,
    IMAGES,
    SEED,
    WIDTH,
    assert_close,
    by_cpu,
    by_device,
    on_an_imagined_device,
    part,
    smooth_images,
    views_of,
    views_on_a_device,
)
from imagined_device import in_process
from selftask.config.schema import Component, ViewConfig
from selftask.data.device.engine import Engine
from selftask.data.device.resampling import filter_matrix, resample
from selftask.data.transforms.geometry import HorizontalFlip
from selftask.data.transforms.transform import Transform
from selftask.data.views import Views
from selftask.errors import UserError
from selftask.registry import TRANSFORMS

JITTER = part("color_jitter", brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, p=0.8)
SIMCLR = [
    part("random_resized_crop", size=32),
    part("horizontal_flip"),
    JITTER,
    part("grayscale", p=0.2),
    part("gaussian_blur"),
    part("solarize", p=0.3),
    part("normalize"),
]
# name: transforms, and what the mean difference in gray levels may be
CASES: dict[str, tuple[list[Component], float]] = {
    "shrinking crop": ([part("random_resized_crop", size=12)], 0.25),
    "growing crop": ([part("random_resized_crop", size=70)], 0.25),
    "bicubic crop": ([part("random_resized_crop", size=20, interpolation="bicubic")], 0.25),
    "nearest crop": ([part("random_resized_crop", size=20, interpolation="nearest")], 0.5),
    "long crops": ([part("random_resized_crop", size=9, ratio=(0.2, 5.0))], 0.25),
    "random_crop": ([part("random_crop", size=32, padding=4)], 0.0),
    "random_crop of less": ([part("random_crop", size=60, padding=3)], 0.0),
    "horizontal_flip": ([part("horizontal_flip")], 0.0),
    "vertical_flip": ([part("vertical_flip", p=0.3)], 0.0),
    "brightness": ([part("color_jitter", brightness=0.8)], 0.1),
    "contrast": ([part("color_jitter", contrast=0.8)], 0.1),
    "saturation": ([part("color_jitter", saturation=0.8)], 0.1),
    "hue": ([part("color_jitter", hue=0.5)], 1.0),
    "jitter": ([JITTER], 1.0),
    "grayscale": ([part("grayscale", p=0.5)], 0.1),
    "gaussian_blur": ([part("gaussian_blur", sigma=(0.0, 3.0), p=0.7)], 0.1),
    "solarize": ([part("solarize", p=0.5, threshold=100)], 0.0),
    "simclr": (SIMCLR, 1.5),
    "two groups": (SIMCLR, 1.5),
}


@pytest.mark.parametrize("name", CASES)
def test_same_draws_same_views(name: str) -> None:
    transforms, most = CASES[name]
    config = views_of(transforms)
    if name == "two groups":
        config["other"] = ViewConfig(transforms=[part("random_resized_crop", size=16), *SIMCLR[1:]])
    images = list(smooth_images(IMAGES, HEIGHT, WIDTH))
    assert_close(config, by_device(config, images), by_cpu(config, images), most)


@pytest.mark.parametrize("name", CASES)
def test_draws_of_a_batch_are_those_of_its_pictures(name: str) -> None:
    config = views_of(CASES[name][0], count=3)
    images = list(smooth_images(IMAGES, HEIGHT, WIDTH))
    one_by_one = by_device(config, images)
    for one, other in zip(one_by_one, by_device(config, images, at_once=True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("at_once", [False, True])
def test_views_that_begin_alike_and_then_differ(at_once: bool) -> None:
    """They are made together as long as their transforms differ in nothing but their draws."""
    solarized = [*SIMCLR[:4], part("solarize", p=0.7, threshold=90), *SIMCLR[4:]]
    often = [SIMCLR[0], part("horizontal_flip", p=0.9), *SIMCLR[2:4], SIMCLR[-1]]
    config = views_of(SIMCLR)
    config["solarized"] = ViewConfig(count=2, transforms=solarized)
    config["often"] = ViewConfig(transforms=often)
    config["small"] = ViewConfig(transforms=[part("random_resized_crop", size=16), *often[1:]])
    config["crop"] = ViewConfig(transforms=[SIMCLR[0], SIMCLR[-1]])
    images = list(smooth_images(IMAGES, HEIGHT, WIDTH))
    assert_close(config, by_device(config, images, at_once=at_once), by_cpu(config, images), 1.5)


DIRECT = [SIMCLR[0], part("horizontal_flip"), part("gaussian_blur")]
IN_WORKER = {
    "affine, crop": [part("random_affine", degrees=30), *DIRECT],
    "crop, affine, flip": [SIMCLR[0], part("random_affine", degrees=30), part("horizontal_flip")],
    "nested": [part("random_apply", transforms=[{"name": "equalize"}]), *DIRECT],
    "all": [part("resize", size=24), part("center_crop", size=21), part("normalize")],
}


@pytest.mark.parametrize("name", IN_WORKER)
def test_workers_apply_transforms_without_a_batched_version(name: str) -> None:
    config = views_of(IN_WORKER[name])
    config["direct"] = ViewConfig(transforms=DIRECT)
    images = [smooth_images(1, 40 + n, 52 - n, seed=n)[0] for n in range(6)]
    assert_close(config, by_device(config, images), by_cpu(config, images), 0.25)


RAGGED = {
    "crop": SIMCLR,
    "cut": [part("random_crop", size=24, padding=2)],
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", RAGGED)
def test_pictures_of_different_sizes(name: str, at_once: bool) -> None:
    config = views_of(RAGGED[name])
    sizes = [(40, 48), (17, 90), (64, 20), (33, 33), (9, 9), (40, 48)]
    images = [smooth_images(1, *size, seed=n)[0] for n, size in enumerate(sizes)]
    ours = by_device(config, images, at_once=at_once)
    assert_close(config, ours, by_cpu(config, images), 1.5)


def test_pictures_of_one_size_in_a_larger_canvas() -> None:
    """As in ``data.cache=device``, where others of the data set are larger than all of a batch."""
    config = views_of([part("horizontal_flip"), part("vertical_flip"), *SIMCLR])
    images = list(smooth_images(6, 20, 30))
    ours = by_device(config, images, room=7)
    assert_close(config, ours, by_cpu(config, images), 1.5)


@pytest.mark.parametrize("size", [16, 224])
def test_half_precision_is_enough_for_resampling(size: int) -> None:
    """What tensor cores compute with on a GPU, against float64."""
    values = torch.from_numpy(smooth_images(3, 60, 60)).permute(0, 3, 1, 2).float()
    start, length = torch.tensor([0.0, 7.0, 31.0]), torch.tensor([60.0, 33.0, 20.0])
    matrix = filter_matrix(start, length, size, 60, "bilinear")
    exact = resample(values.double(), matrix.double(), matrix.double())
    difference = (resample(values, matrix, matrix, torch.float16) - exact).abs()
    assert difference.mean() < 0.1
    assert difference.max() < 0.5


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_pictures_of_other_channels(channels: int) -> None:
    chain = [
        part("random_resized_crop", size=32),
        part("gaussian_blur", p=1.0),
        part("color_jitter", brightness=0.4, contrast=0.4),
        part("horizontal_flip"),
        part("solarize"),
    ]
    config = views_of(chain)
    images = list(smooth_images(6, HEIGHT, WIDTH, channels=channels))
    assert_close(config, by_device(config, images), by_cpu(config, images), 1.5)


def test_pixels_are_left_as_they_were() -> None:
    """A view that begins with a change in place must not change what the next view sees."""
    config = views_of([part("solarize", p=1.0)], count=2)
    first, second = by_device(config, list(smooth_images(4, 8, 8)))
    assert torch.equal(first, second)


def test_moments_over_many_pictures() -> None:
    """Fractions and means of 2000 draws at once, within 5 standard errors."""
    config = views_of([part("horizontal_flip", p=0.3), part("random_resized_crop", size=8)], 1)
    engine = Engine(Views(config), config)
    n = 2000
    packed = engine.draw_batch(0, np.zeros(n, int), np.arange(n), np.tile((64, 64), (n, 1)))
    chosen = packed.step(0)["chosen"].float().mean()
    assert abs(chosen - 0.3) < 5 * (0.21 / n) ** 0.5
    left, top, right, bottom = packed.step(1)["box"].T
    for low, high in ((left, right), (top, bottom)):
        middle = (low + high) / 2 / 64 - 0.5
        assert abs(middle.mean()) < 5 * middle.std() / n**0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiles_as_one_graph() -> None:
    """No break in the graph: nothing asks the host about the device's values."""
    config = views_of(SIMCLR)
    images = smooth_images(4, HEIGHT, WIDTH)
    engine = Engine(Views(config), config)
    sizes = np.tile((HEIGHT, WIDTH), (4, 1))
    packed = engine.draw_batch(SEED, np.zeros(4, int), np.arange(4), sizes)
    compiled = torch.compile(engine, backend="eager", fullgraph=True)
    pixels = torch.from_numpy(images)
    expected = engine(pixels, None, packed)
    for one, other in zip(compiled(pixels, None, packed), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_asked_of_a_device(name: str) -> None:
    sizes = np.tile((HEIGHT, WIDTH), (4, 1))
    on_an_imagined_device(CASES[name][0], sizes)


@pytest.mark.parametrize("name", RAGGED)
def test_nothing_is_asked_of_a_device_about_different_sizes(name: str) -> None:
    sizes = np.array([(HEIGHT, WIDTH), (30, 30), (40, 40), (9, 9)])
    on_an_imagined_device(RAGGED[name], sizes)


class Asking(Transform):
    """A user's transform that asks the device for a value."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> tuple[()]:
        return ()

    def apply(self, image: np.ndarray, params: tuple[()]) -> np.ndarray:
        return image

    def on_batch(self, images: torch.Tensor, params: list[tuple[()]]) -> torch.Tensor:
        return images * max(images.amax((1, 2, 3)).tolist())


def _ask_the_device() -> None:
    TRANSFORMS._registered["asking"] = Asking
    views_on_a_device([part("asking")], np.tile((HEIGHT, WIDTH), (4, 1)))


def test_a_question_to_the_device_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"test_device_engine.py:\d+ in on_batch"):
        in_process(_ask_the_device)


class Darker(Transform):
    """A user's transform with a form for batches."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> float | None:
        factor = float(rng.random())
        return factor if factor < 0.7 else None

    def apply(self, image: np.ndarray, params: float) -> np.ndarray:
        return np.rint(image * params).astype(np.uint8)

    def on_batch(self, images: torch.Tensor, params: list[float | None]) -> torch.Tensor:
        factors = torch.tensor([1.0 if one is None else one for one in params])
        return images * factors[:, None, None, None]


class Cropping(Darker):
    def on_batch(self, images: torch.Tensor, params: list[float | None]) -> torch.Tensor:
        return images[..., 1:]


class Function:
    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return image


class Mirrored(HorizontalFlip):
    """Might mean anything: what it inherits says nothing about it."""


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms of a user, for the time of a test."""
    for made in (Darker, Cropping, Function, Mirrored):
        monkeypatch.setitem(TRANSFORMS._registered, made.__name__.lower(), made)


def test_a_users_transform_with_a_form_for_batches() -> None:
    config = views_of([*SIMCLR[:2], part("darker"), part("grayscale")])
    images = list(smooth_images(8, HEIGHT, WIDTH))
    for at_once in (False, True):
        ours = by_device(config, images, at_once=at_once)
        assert_close(config, ours, by_cpu(config, images), 0.5)


def test_a_form_for_batches_must_keep_the_shape() -> None:
    config = views_of([part("cropping")])
    with pytest.raises(UserError, match=r"Cropping.on_batch gave shape \(4, 3, 8, 7\)"):
        by_device(config, list(smooth_images(4, 8, 8)))


@pytest.mark.parametrize("name", ["function", "mirrored"])
def test_workers_apply_a_users_transform(name: str) -> None:
    config = views_of([part("random_resized_crop", size=8), part(name), part("normalize")])
    images = list(smooth_images(4, 12, 12))
    for ours, cpu in zip(by_device(config, images), by_cpu(config, images), strict=True):
        torch.testing.assert_close(ours, cpu)


def test_different_sizes_need_a_crop_first() -> None:
    images = [smooth_images(1, 9, 9)[0], smooth_images(1, 8, 9)[0]]
    with pytest.raises(UserError, match=r"views\.\w+\.transforms: ColorJitter comes before any"):
        by_device(views_of([JITTER, *SIMCLR]), images)
    with pytest.raises(UserError, match=r"images of different sizes \(9x8, 9x9\) make no batch"):
        by_device(views_of([]), images)
