"""The draws of views in a batch, compared with images whose pixels say where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from selftask.batch import Batch, Draws
from selftask.config.load import load_config
from selftask.config.schema import Component, ViewConfig
from selftask.data.data_module import DataModule
from selftask.data.draw_recorder import DrawRecorder
from selftask.data.loading.open_data import open_data
from selftask.data.transforms.transform import Trace, Transform
from selftask.data.views import Views
from selftask.distributed.world import World
from selftask.errors import ConfigError
from selftask.registry import TRANSFORMS, register_transform

HEIGHT, WIDTH = 200, 240
X, Y = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
MAP = np.stack([X, Y, np.full_like(X, 255)], axis=2).astype(np.uint8)
"""Red is x, green is y (rounded down), and blue is 255: 0 where a view reaches beyond."""
SEED, EPOCH = 3, 2


def part(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, **args}


def component(transform: dict[str, Any]) -> Component:
    args = {key: value for key, value in transform.items() if key != "name"}
    return Component(name=transform["name"], args=args)


def recorded(views: dict[str, ViewConfig], index: int) -> tuple[list[np.ndarray], list[Draws]]:
    """All views of the map, and their draws."""
    made = Views(views)
    recorder = DrawRecorder(made, views, list(views))
    traces: list[Trace] = []
    images = made(MAP, SEED, EPOCH, index, traces=traces)
    row = recorder.row([(HEIGHT, WIDTH)], traces)
    draws = recorder.unpack(torch.from_numpy(row)[None])
    return images, [one for group in draws.values() for one in group]


def assert_where(view: np.ndarray, draws: Draws, most: float = 1.0) -> None:
    """Compare the positions that the pixels of a view show with those of its matrix."""
    rows, columns = view.shape[:2]
    expected = draws.centers(rows, columns)[0].view(rows, columns, 2).numpy()
    inside = view[..., 2] == 255
    inside[[0, -1]] = inside[:, [0, -1]] = False  # at the border of a crop the filter is one-sided
    error = np.abs(view[..., :2] + 0.5 - expected)[inside]
    assert inside.sum() > 4
    assert error.max() <= most + 0.51, error.max()


CROP = part("random_resized_crop", size=64, scale=(0.2, 0.9))
FLIPS = [part("horizontal_flip"), part("vertical_flip")]
MAPS = [
    part("rotation", degrees=40.0),
    part("random_affine", degrees=20.0, scale=(0.8, 1.3), translate=0.1),
    part("random_shear", x=15.0, y=10.0),
    *(part("rotate_90", k=[turns]) for turns in (1, 2, 3)),
    part("center_crop", size=150),
    part("center_crop", size=300),
    part("random_crop", size=150),
    part("random_crop", size=300, padding=7),
    part("resize", size=90),
    part("tile", grid=2),
]
NESTED = [
    part("random_apply", p=0.5, transforms=[part("vertical_flip", p=1.0)]),
    part("random_choice", choices=[[part("rotation", degrees=30.0)], FLIPS, []]),
    part("random_order", transforms=[part("resize", size=150), part("random_crop", size=120)]),
]


@pytest.mark.parametrize(
    "transforms",
    [
        [],
        [CROP],
        [CROP, *FLIPS],
        NESTED,
        *([one] for one in MAPS),
        *([CROP, one, *FLIPS] for one in MAPS),
    ],
    ids=lambda transforms: "-".join(each["name"] for each in transforms),
)
def test_the_matrix_says_where_each_pixel_comes_from(transforms: list[dict[str, Any]]) -> None:
    views = {"main": ViewConfig(transforms=[component(one) for one in transforms])}
    for index in range(8):
        (view,), (draws,) = recorded(views, index)
        assert_where(view, draws, most=2.5)


def test_policies_compose_their_geometric_operations() -> None:
    operations = (("Rotate", 20.0), ("Brightness", 0.0), ("ShearX", 0.2), ("TranslateY", -16.0))
    for name in ("rand_augment", "trivial_augment_wide", "auto_augment"):
        policy = TRANSFORMS[name](interpolation="bilinear")
        a, b, c, d, e, f = policy.source_matrix(operations, HEIGHT, WIDTH)
        unit = torch.tensor([[[a * WIDTH, b * HEIGHT, c], [d * WIDTH, e * HEIGHT, f]]])
        draws = Draws(matrix=unit, image_size=torch.zeros(1, 2), params={})
        assert_where(policy.apply(MAP, operations), draws, most=2.5)


def test_the_drawn_rotation_is_counterclockwise() -> None:
    """As Pillow's, of an angle in degrees."""
    for degrees in (25.0, 170.0):
        rotation = TRANSFORMS["rotation"](degrees=degrees, interpolation="nearest")
        params = rotation.draw(np.random.default_rng(1), HEIGHT, WIDTH)
        (angle,) = rotation.numbers(params)
        turned = np.asarray(Image.fromarray(MAP).rotate(angle))
        different = (rotation.apply(MAP, params) != turned).any(axis=2)
        assert different.mean() < 0.02


def test_derived_views_point_to_the_image_too() -> None:
    views = {
        "crop": ViewConfig(count=0, transforms=[component(CROP), component(FLIPS[0])]),
        "small": ViewConfig(of="crop", transforms=[component(part("resize", size=32))]),
        "tiles": ViewConfig(of="crop", count=9, transforms=[component(part("tile", size=16))]),
    }
    for index in range(4):
        made, draws = recorded(views, index)
        assert len(made) == len(draws) == 10
        for view, one in zip(made, draws, strict=True):
            assert_where(view, one, most=2.5)


def test_boxes_and_named_numbers() -> None:
    jitter = part("color_jitter", brightness=0.4, hue=0.1, p=0.5)
    transforms = [CROP, FLIPS[0], jitter, part("gaussian_blur"), part("grayscale", p=0.3)]
    views = {"main": ViewConfig(transforms=[component(one) for one in transforms])}
    flipped, seen, unchanged = [], set(), 0
    for index in range(30):
        (view,), (draws,) = recorded(views, index)
        params = {name: values[0].tolist() for name, values in draws.params.items()}
        assert list(params) == [one["name"] for one in transforms]
        left, top, right, bottom = params["random_resized_crop"]
        assert torch.allclose(draws.boxes[0], torch.tensor([left, top, right, bottom]), atol=1e-3)
        crop = TRANSFORMS["random_resized_crop"](size=64)
        own = MAP[int(top) : int(bottom), int(left) : int(right)]
        expected = crop.apply(own, (0, 0, own.shape[1], own.shape[0]))
        if params["horizontal_flip"] == [1.0]:
            expected = expected[:, ::-1]
        if params["color_jitter"] == [1, 1, 1, 0] and params["grayscale"] == [0]:
            unchanged += 1
            if params["gaussian_blur"] == [0]:
                assert np.abs(view.astype(int) - expected).max() <= 1
            else:
                assert 0.1 <= params["gaussian_blur"][0] <= 2
        flipped.append(params["horizontal_flip"][0])
        seen.add(tuple(params["color_jitter"]))
        assert draws.image_size.tolist() == [[HEIGHT, WIDTH]]
    assert 5 < sum(flipped) < 25 and len(seen) > 8 and unchanged > 3


def test_the_tiles_of_a_puzzle_are_named() -> None:
    views = {
        "main": ViewConfig(transforms=[component(part("jigsaw", grid=2, num_permutations=24))])
    }
    for index in range(6):
        (view,), (draws,) = recorded(views, index)
        tiles = [MAP[y : y + 100, x : x + 120] for y in (0, 100) for x in (0, 120)]
        order = draws.params["jigsaw"][0].int().tolist()
        rows = [np.concatenate([tiles[order[at]], tiles[order[at + 1]]], axis=1) for at in (0, 2)]
        assert np.array_equal(view, np.concatenate(rows))


def test_two_transforms_of_one_name() -> None:
    views = {"main": ViewConfig(transforms=[component(one) for one in (CROP, *FLIPS, FLIPS[0])])}
    (_,), (draws,) = recorded(views, 0)
    assert [*draws.params] == [
        "random_resized_crop", "horizontal_flip", "vertical_flip", "horizontal_flip_2"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["elastic", "random_perspective", "aug_mix", "jigsaw"])
def test_a_method_that_needs_boxes_refuses_transforms_without(name: str) -> None:
    nested = f"{{name: random_apply, transforms: [{name}]}}"
    given = [f"views.main.transforms=[{name},{nested},normalize]"]
    with pytest.raises(ConfigError) as caught:
        load_config("vicregl", given)
    for place in ("0", "1.transforms.0"):
        key = f"views.main.transforms.{place}"
        assert f"{key}: '{name}' moves pixels in a way that no box describes" in str(caught.value)
    load_config("simclr", given)


@pytest.mark.usefixtures("forget_names")
def test_a_transform_of_ones_own() -> None:
    @register_transform("slides")
    class Slides(Transform):
        """Three pixels to the left; has no batched form."""

        def draw(self, rng: np.random.Generator, height: int, width: int) -> float:
            return rng.random()

        def apply(self, image: np.ndarray, params: float) -> np.ndarray:
            return np.roll(image, -3, axis=1)

        def source_matrix(self, params: Any, height: int, width: int) -> tuple[float, ...]:
            return 1, 0, 3, 0, 1, 0

    @register_transform("opaque")
    class Opaque:
        def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            return np.maximum(image, np.uint8(9 * rng.random()))

    last = {"main": ViewConfig(transforms=[component(part(n)) for n in ("slides", "opaque")])}
    (_,), (draws,) = recorded(last, 0)
    assert draws.matrix[0].tolist() == [[WIDTH, 0, 3], [0, HEIGHT, 0]]
    first = {"main": ViewConfig(transforms=[component(part(n)) for n in ("opaque", "slides")])}
    with pytest.raises(ConfigError, match="drawn after 'opaque' is not known"):
        recorded(first, 0)


def batches(tmp_path: Path, *overrides: str, steps: int = 2) -> list[Batch]:
    given = ["method=swav", "train.batch_size=8", f"out={tmp_path}", *overrides]
    if not any(text.startswith("data.num_workers") for text in overrides):
        given.append("data.num_workers=0")
    config = load_config("simclr/digits", given)
    module = DataModule(config, open_data(config.data), World(), torch.device("cpu"))
    try:
        read = module.train_batches(0)
        return [next(read) for _ in range(steps)]
    finally:
        module.close()


ASKED = ["views.main.draws=true"]
WAYS = {
    "workers": ["data.num_workers=2"],
    "ram": ["data.cache=ram"],
    "device": ["data.augment_on=device"],
    "device workers": ["data.augment_on=device", "data.num_workers=2"],
    "device cache": ["data.augment_on=device", "data.cache=device"],
}
# The recipe's transforms have no batched version, which data.cache=device needs.
BATCHED = ["views.main.transforms=[{name: random_resized_crop, size: 16}, solarize, normalize]"]


@pytest.mark.parametrize("way", list(WAYS))
def test_every_way_of_making_views_has_the_same_draws(way: str, tmp_path: Path) -> None:
    settings = [*ASKED, *(BATCHED if way == "device cache" else [])]
    expected = batches(tmp_path, *settings)
    for one, other in zip(batches(tmp_path, *settings, *WAYS[way]), expected, strict=True):
        assert torch.equal(one.index, other.index)
        assert list(one.draws) == ["main"] and len(one.draws["main"]) == len(one.views["main"])
        for draws, wanted in zip(one.draws["main"], other.draws["main"], strict=True):
            assert torch.equal(draws.matrix, wanted.matrix)
            assert torch.equal(draws.image_size, wanted.image_size)
            assert draws.params.keys() == wanted.params.keys()
            for name, values in draws.params.items():
                assert torch.equal(values, wanted.params[name])


@pytest.mark.parametrize("augment_on", ["cpu", "device"])
def test_asking_changes_no_view(augment_on: str, tmp_path: Path) -> None:
    (silent,) = batches(tmp_path, f"data.augment_on={augment_on}", steps=1)
    (asked,) = batches(tmp_path, f"data.augment_on={augment_on}", *ASKED, steps=1)
    assert silent.draws == {}
    assert all(torch.equal(a, b) for a, b in zip(silent.all_views, asked.all_views, strict=True))


def test_max_side_shrinks_the_image_that_boxes_are_in(tmp_path: Path) -> None:
    """The digits recipe's affine map draws shares of the image's size."""
    (whole,) = batches(tmp_path, *ASKED, "data.augment_on=device", steps=1)
    shrink = ["data.augment_on=device", "data.max_side=20"]
    (shrunk,) = batches(tmp_path, *ASKED, *shrink, steps=1)
    one, other = whole.draws["main"][0], shrunk.draws["main"][0]
    assert other.image_size.unique().tolist() == [20.0]
    assert torch.allclose(other.matrix, one.matrix * 20 / one.image_size[0, 0], atol=1e-3)
