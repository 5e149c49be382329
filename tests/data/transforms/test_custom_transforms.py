"""``name: custom``: classes and functions for Pillow images, as AugLy's are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import RandomAffine

from selftask.config.load import load_config
from selftask.config.schema import Component, ViewConfig
from selftask.data.transforms.pipeline import build_pipeline
from selftask.data.views import Views
from selftask.errors import ConfigError, UserError
from selftask.random.views import draw_rng

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
IMAGE.flags.writeable = False

LIKE_AUGLY = '''
import random

import numpy as np
from PIL import ImageFilter


class BaseTransform:
    """AugLy's: image/transforms.py, with a chance of its own."""

    def __init__(self, p=1.0):
        assert 0 <= p <= 1.0, "p must be a value in the range [0, 1]"
        self.p = p

    def __call__(self, image, force=False, metadata=None, bboxes=None, bbox_format=None):
        if not force and random.random() > self.p:
            return image
        return self.apply_transform(image, metadata, bboxes, bbox_format)


class RandomBlur(BaseTransform):
    def __init__(self, min_radius=0.0, max_radius=10.0, p=1.0):
        super().__init__(p)
        self.span = min_radius, max_radius

    def apply_transform(self, image, metadata=None, bboxes=None, bbox_format=None):
        return image.filter(ImageFilter.GaussianBlur(np.random.uniform(*self.span)))


class Stubborn:
    def __call__(self, image):
        return "no image"
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_names: None) -> None:
    (tmp_path / "like_augly.py").write_text(LIKE_AUGLY)
    monkeypatch.chdir(tmp_path)


def part(transform: str, **args: Any) -> Component:
    return Component(name="custom", args={"transform": transform, "args": args})


def made(component: Component, index: int = 0) -> np.ndarray:
    return build_pipeline([component])(IMAGE, draw_rng(3, 0, index, 0))


def test_functions_and_classes_do_to_an_image_what_they_do_alone() -> None:
    image = Image.fromarray(IMAGE)
    assert np.array_equal(made(part("PIL.ImageOps:mirror")), np.asarray(ImageOps.mirror(image)))
    solarized = made(part("PIL.ImageOps:solarize", threshold=99))
    assert np.array_equal(solarized, np.asarray(ImageOps.solarize(image, 99)))
    gray = made(part("PIL.ImageOps:grayscale"))
    assert np.array_equal(gray, np.asarray(image.convert("L").convert("RGB")))
    resized = made(part("torchvision.transforms:Resize", size=10))
    assert resized.shape == (10, 15, 3)


@pytest.mark.usefixtures("library")
def test_a_class_of_auglys_shape_draws_for_each_image_and_leaves_the_generators() -> None:
    component = part("like_augly:RandomBlur", min_radius=1, max_radius=5, p=0.5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    outs = [made(component, index) for index in range(20)]
    assert before[0] == random.getstate()
    assert before[1] == np.random.get_state()[1].tolist()
    assert torch.equal(before[2], torch.get_rng_state())
    same = [np.array_equal(out, IMAGE) for out in outs]
    assert 3 < sum(same) < 17
    assert len({out.tobytes() for out in outs}) == 1 + same.count(False)
    random.seed(9)
    assert all(np.array_equal(made(component, index), out) for index, out in enumerate(outs))


def test_radius_and_chance_are_those_of_the_seeded_generators(library: None) -> None:
    component = part("like_augly:RandomBlur", min_radius=1, max_radius=5)
    seed = int(draw_rng(3, 0, 7, 0).random() * 2**32)
    np.random.seed(seed)
    blur = ImageFilter.GaussianBlur(np.random.uniform(1, 5))
    assert np.array_equal(made(component, 7), np.asarray(Image.fromarray(IMAGE).filter(blur)))


def test_draws_of_torchvision_are_repeatable() -> None:
    component = part("torchvision.transforms:RandomAffine", degrees=40)
    first, second = (made(component, index) for index in (0, 1))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, made(component, 0))
    torch.manual_seed(int(draw_rng(3, 0, 0, 0).random() * 2**32))
    assert np.array_equal(first, np.asarray(RandomAffine(40)(Image.fromarray(IMAGE))))


@pytest.mark.usefixtures("library")
def test_in_a_recipe_also_within_another_transform() -> None:
    inside = {"name": "custom", "transform": "like_augly:RandomBlur", "args": {"min_radius": 3}}
    blur = "{name: custom, transform: 'like_augly:RandomBlur', args: {min_radius: 3}}"
    applied = f"{{name: random_apply, p: 1.0, transforms: [{blur}]}}"
    config = load_config("simclr/digits", [f"views.main.transforms=[{applied}, normalize]"])
    assert config.views["main"].transforms[0].args["transforms"] == [inside]
    views = Views(config.views)(IMAGE, 0, 0, 0)
    assert len(views) == 2
    assert not np.array_equal(views[0], views[1])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("component", "message"),
    [
        (
            part("like_augly:RandomBlurr"),
            r"^transforms.0.transform: like_augly has no .*mean 'RandomBlur'",
        ),
        (part("like_augli:RandomBlur"), r"transform: no module named 'like_augli'"),
        (part("like_augly.RandomBlur"), r"transform: .* is no package\.module:name"),
        (part("like_augly:RandomBlur", radius=3), r"args: .* takes no \{'radius': 3\}: .*unexpect"),
        (part("like_augly:RandomBlur", p=3), r"args: .* p must be a value in the range"),
        (part("like_augly:Stubborn"), r"like_augly:Stubborn gave a str; a Pillow image or an arr"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told(component: Component, message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(component)


DEVICE_CACHE = ("data.augment_on=device", "data.cache=device")


def test_other_numbers_of_channels_and_the_cache_on_the_device_are_refused() -> None:
    views = {"a": ViewConfig(transforms=[part("PIL.ImageOps:mirror")])}
    with pytest.raises(ConfigError, match=r"views\.a\.transforms\.0\.name: custom needs 3 channe"):
        Views(views, 4)
    mirror = "{name: custom, transform: 'PIL.ImageOps:mirror'}"
    words = [*DEVICE_CACHE, f"views.main.transforms=[{mirror}, normalize]"]
    with pytest.raises(ConfigError, match=r"'custom' has no form for whole batches"):
        load_config("simclr/images", ["data=digits", *words])


def test_auglys_own() -> None:
    pytest.importorskip("augly.image")
    component = part("augly.image:RandomBlur", min_radius=1, max_radius=5, p=0.5)
    outs = [made(component, index) for index in range(10)]
    assert len({out.tobytes() for out in outs}) > 3
    assert np.array_equal(outs[4], made(component, 4))
    assert made(part("augly.image:Pad", w_factor=0.5, h_factor=0.5)).shape == (40, 60, 3)
