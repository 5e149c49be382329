"""Images of 1, 2, 4, 5 and 13 channels: each channel as its own image would be changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from selftask.config.schema import Component, ViewConfig
from selftask.data.loading.dataset import EvalDataset, ViewDataset
from selftask.data.open_source import open_source
from selftask.data.source import Source
from selftask.data.transforms.channels import by_groups, channel_problems, for_channels
from selftask.data.transforms.pipeline import Compose, build_pipeline
from selftask.data.views import Views
from selftask.errors import BadImage, ConfigError, UserError
from selftask.random.views import draw_rng
from selftask.registry import TRANSFORMS, Registry

MANY = (1, 2, 4, 5, 13)
NESTED: list[Any] = [{"name": "horizontal_flip", "p": 1.0}, {"name": "gaussian_noise", "p": 1.0}]
ARGS: dict[str, dict[str, Any]] = {
    "random_resized_crop": {"size": 8},
    "random_crop": {"size": 8, "padding": 2},
    "center_crop": {"size": 40},
    "resize": {"size": 8},
    "rotation": {"degrees": 30.0, "fill": 9},
    "random_affine": {"degrees": 30.0, "scale": (0.5, 1.5), "translate": 0.5, "fill": 9},
    "random_shear": {"x": 20.0, "y": 20.0, "fill": 9},
    "random_perspective": {"fill": 9},
    "elastic": {"fill": 9},
    "color_jitter": {"brightness": 0.8, "contrast": 0.8},
    "contrast_noise": {"contrast": (0.5, 1.5), "offset": (-0.5, 0.5), "noise": 0.1},
    "random_apply": {"transforms": NESTED},
    "random_choice": {"choices": [NESTED, []]},
    "random_order": {"transforms": NESTED},
    "jigsaw": {"grid": 2, "num_permutations": 24},
    "aug_mix": {"all_ops": False},
    "random_erasing": {"fill": "noise"},
}
NAMES = Registry("transform", "selftask.data.transforms").names()
OF_COLOURS = [
    *("auto_augment", "bgr", "custom", "grayscale", "lab", "lighting", "lightness"),
    *("rand_augment", "trivial_augment_wide"),
]
ANY = [name for name in NAMES if name not in (*OF_COLOURS, "normalize")]
OF_ALL = {"channel_drop", "gaussian_noise", "random_erasing"}  # what a channel gets is its own
NESTS = {"random_apply", "random_choice", "random_order"}


def build(name: str, channels: int, **more: Any) -> Any:
    args = {**ARGS.get(name, {}), **more}
    if "p" in vars(TRANSFORMS[name]):
        args.setdefault("p", 1.0)
    return for_channels(TRANSFORMS[name](**args), channels)


def named(name: str, **args: Any) -> Component:
    return Component(name=name, args=args)


def smooth_image(channels: int, height: int = 24, width: int = 33) -> np.ndarray:
    """Another one in each channel."""
    shape = height, width, channels
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image.flags.writeable = False
    return image


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("channels", MANY)
@pytest.mark.parametrize("name", ANY)
def test_every_transform_takes_them(name: str, channels: int) -> None:
    if name == "channel_drop" and channels == 1:
        return
    transform, image = build(name, channels), smooth_image(channels)
    pipeline, before = Compose([build(name, 3)], channels), image.copy()
    for index in range(6):
        out = transform(image, draw_rng(3, 0, index, 0))
        assert out.dtype == np.uint8 and out.ndim == 3 and out.shape[2] == channels
        assert out.flags.c_contiguous
        assert np.array_equal(pipeline(image, draw_rng(3, 0, index, 0)), out)
    assert np.array_equal(image, before)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("channels", [2, 5, 13])
@pytest.mark.parametrize("name", sorted({*ANY} - OF_ALL - NESTS - {"color_jitter"}))
def test_each_channel_is_changed_as_it_would_be_alone(name: str, channels: int) -> None:
    """Three equal channels, which go the way of RGB images, are the reference."""
    image = smooth_image(channels)
    for index in range(4):
        out = build(name, channels)(image, draw_rng(0, 0, index, 0))
        for channel in range(channels):
            alone = np.repeat(image[..., channel, None], 3, axis=2)
            expected = build(name, 3)(alone, draw_rng(0, 0, index, 0))
            assert np.array_equal(out[..., channel], expected[..., 0])


@pytest.mark.parametrize("channels", MANY)
def test_brightness_and_contrast_of_all_channels_alike(channels: int) -> None:
    image = smooth_image(channels)
    bright = build("color_jitter", channels, brightness=0.5, contrast=0.0)
    factor = bright.draw(draw_rng(0, 0, 1, 0), 24, 33).brightness
    expected = np.rint(np.clip(image * factor, 0, 255))
    assert np.array_equal(bright(image, draw_rng(0, 0, 1, 0)), expected)
    contrast = build("color_jitter", channels, brightness=0.0, contrast=0.5)
    factor = contrast.draw(draw_rng(0, 0, 2, 0), 24, 33).contrast
    expected = np.clip(image.mean() + factor * (image - image.mean()), 0, 255)
    assert np.abs(contrast(image, draw_rng(0, 0, 2, 0)) - expected).max() < 1.1  # mean is rounded


def test_groups_are_of_sizes_that_opencv_knows() -> None:
    seen: list[tuple[int, ...]] = []

    def look(part: np.ndarray) -> np.ndarray:
        seen.append(part.shape[2:])
        return part

    for channels, expected in ((1, [()]), (2, [(), ()]), (6, [(4,), (), ()]), (3, [(3,)])):
        seen.clear()
        assert np.array_equal(by_groups(look, smooth_image(channels)), smooth_image(channels))
        assert seen == expected


@pytest.mark.parametrize(
    ("name", "args", "channels", "message"),
    [
        ("color_jitter", {"hue": 0.1}, 13, "hue: 0.1 needs 3 channels, the data have 13; use 0"),
        ("color_jitter", {"saturation": 0.4}, 1, "saturation: 0.4 needs 3 channels"),
        ("grayscale", {"p": 0.2}, 5, "p: 0.2; grayscale needs 3 channels, the data have 5"),
        ("lab", {}, 4, "name: lab needs 3 channels"),
        ("lighting", {}, 1, "std: 0.1 needs 3 channels"),
        ("lightness", {}, 1, "name: lightness needs 3 channels"),
        ("bgr", {}, 4, "name: bgr needs 3 channels"),
        ("rand_augment", {}, 4, "name: rand_augment changes saturation and needs 3"),
        ("auto_augment", {}, 4, "name: auto_augment changes saturation and needs 3"),
        ("trivial_augment_wide", {}, 4, "name: trivial_augment_wide changes saturation and needs"),
        ("aug_mix", {}, 4, "all_ops: true changes saturation and needs 3 channels"),
        ("channel_drop", {"keep": 3}, 3, "keep: 3; the data have 3, and less than that"),
        (
            "random_erasing",
            {"fill": [1, 2]},
            3,
            "fill: [1, 2] is for 2 channels, the data have 3; or",
        ),
        ("cutout", {"fill": [1, 2, 3]}, 4, "fill: [1, 2, 3] is for 3 channels, the data have 4"),
        ("normalize", {}, 4, "stats: imagenet is for 3 channels, the data have 4; give mean"),
        (
            "normalize",
            {"mean": [0.5], "std": [1.0]},
            3,
            "mean: [0.5] is for 1 channel, the data have 3",
        ),
        ("random_apply", {"transforms": [{"name": "lab"}]}, 1, "transforms.0.name: lab needs"),
        ("random_choice", {"choices": [[], [{"name": "lab"}]]}, 1, "choices.1.0.name: lab needs"),
        ("random_order", {"transforms": [{"name": "lab"}]}, 1, "transforms.0.name: lab needs"),
    ],
)
def test_what_is_about_colours_is_refused(
    name: str, args: dict[str, Any], channels: int, message: str
) -> None:
    (problem,) = channel_problems(TRANSFORMS[name](**args), channels)
    assert problem.startswith(message)


def test_nothing_is_refused_that_does_nothing() -> None:
    views = {"a": ViewConfig(transforms=[named("grayscale", p=0.0), named("color_jitter")])}
    assert len(Views(views, 13)) == 1
    views["b"] = ViewConfig(transforms=[named("horizontal_flip"), named("lab")])
    with pytest.raises(ConfigError, match=r"views\.b\.transforms\.1\.name: lab needs 3 channels"):
        Views(views, 13)


@pytest.mark.parametrize("channels", MANY)
def test_normalize_has_a_mean_and_std_for_each(channels: int) -> None:
    pixels = torch.from_numpy(smooth_image(channels)[None].copy())
    mean, std = np.linspace(0.1, 0.9, channels), np.linspace(1.0, 2.0, channels)
    expected = (pixels.numpy() / 255 - mean) / std
    args = {"mean": mean.tolist(), "std": std.tolist()}
    own = build_pipeline([named("normalize", **args)], "views", channels).to_float(pixels)
    assert np.allclose(own.permute(0, 2, 3, 1), expected, atol=1e-6)
    half = build_pipeline([named("normalize", stats="half")], "views", channels)
    assert np.allclose(half.to_float(pixels).permute(0, 2, 3, 1), pixels / 127.5 - 1, atol=1e-6)
    assert np.allclose(Compose([], channels).to_float(pixels)[0, 0], pixels[0, ..., 0] / 255)


@dataclass(frozen=True)
class Told:
    channels: ClassVar[int] = 3


@dataclass(frozen=True)
class WithAKey:
    channels: int = 3  # something of the user's own


def test_only_those_that_ask_are_told_the_number() -> None:
    transform, key = Told(), WithAKey()
    assert for_channels(transform, 13).channels == 13
    assert transform.channels == 3, "the given one is not changed"
    assert for_channels(key, 13) is key and for_channels(print, 13) is print


class Odd:
    """No ``Source``, and says nothing of channels: three are expected."""

    labels = None

    def __init__(self, channels: int) -> None:
        self.image = smooth_image(channels)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.image, -1

    def path(self, index: int) -> str:
        return "x.png"


def test_a_source_that_says_nothing_gives_three_channels() -> None:
    views = Views({"a": ViewConfig(transforms=[])})
    assert ViewDataset(Odd(3), views, 0)[0, 0].views[0].shape[2] == 3  # type: ignore[arg-type]
    for dataset in (ViewDataset(Odd(4), views, 0), EvalDataset(Odd(4), Compose([]))):  # type: ignore[arg-type]
        with pytest.raises(
            UserError, match=r"x\.png: an array of shape \(24, 33, 4\); \(H, W, 3\)"
        ):
            dataset[0, 0]


STACK = np.random.default_rng(0).integers(0, 256, (3, 6, 7, 5), dtype=np.uint8)


class Cells:
    """Five stains as tensors, channels first; ``gray`` gives Pillow images."""

    def __init__(self, gray: bool = False) -> None:
        self.gray = gray

    def __len__(self) -> int:
        return len(STACK)

    def __getitem__(self, index: int) -> Any:
        one = STACK[index]
        return Image.fromarray(one[..., 0]) if self.gray else torch.from_numpy(one).permute(2, 0, 1)


@pytest.mark.parametrize("name", ["array", "hdf5", "custom"])
def test_sources_that_are_told_the_number(name: str, tmp_path: Path) -> None:
    if name == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "x", "w") as file:
            file["images"] = STACK
            file["first"] = np.moveaxis(STACK, 3, 1)
    np.savez(tmp_path / "x.npz", images=STACK, first=np.moveaxis(STACK, 3, 1))
    path = str(tmp_path / ("x" if name == "hdf5" else "x.npz"))
    place = {"dataset": f"{__name__}:Cells"} if name == "custom" else {"path": path}
    opened = [source(name, **place, channels=5)]
    opened += [] if name == "custom" else [source(name, **place, images="first", channels=5)]
    for one in opened:
        assert one.channels == 5
        assert all(np.array_equal(one[index][0], STACK[index]) for index in range(3))
    reason = r"of shape \(.*\) is not an image with 4 channels"
    if name == "custom":
        with pytest.raises(BadImage, match=reason):
            source(name, **place, channels=4)[0]
        gray = source(name, **place, args={"gray": True}, channels=1)
        assert np.array_equal(gray[1][0], STACK[1, ..., :1])
    else:
        with pytest.raises(UserError, match=rf"data\.channels=4: .*{reason}"):
            source(name, **place, channels=4)


def source(name: str, **args: Any) -> Source:
    return open_source(named(name, **args))
