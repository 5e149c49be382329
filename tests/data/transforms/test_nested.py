"""Transforms made of transforms: what they draw, and what a config with them is told."""

from __future__ import annotations

import math
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from selftask.config.load import load_config, to_yaml
from selftask.data.views import Views
from selftask.equivalence.tiny_recipe import _small_views
from selftask.errors import ConfigError
from selftask.registry import TRANSFORMS

IMAGE = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
FLIP = {"name": "horizontal_flip", "p": 1.0}
UPSIDE_DOWN = {"name": "vertical_flip", "p": 1.0}
INVERT = {"name": "invert", "p": 1.0}
POSTERIZE = {"name": "posterize", "p": 1.0, "bits": 2}
CROP = {"name": "center_crop", "size": 8}


def build(name: str, **args: Any) -> Any:
    return TRANSFORMS[name](**args)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def share_of(transform: Any, expected: np.ndarray, n: int = 600) -> float:
    draws = rng()
    return float(np.mean([np.array_equal(transform(IMAGE, draws), expected) for _ in range(n)]))


def error_of(share: float, n: int = 600) -> float:
    return 5 * math.sqrt(share * (1 - share) / n) + 1e-9


def test_random_apply_is_all_or_nothing() -> None:
    both = 255 - IMAGE[:, ::-1]
    for p in (0.0, 0.3, 1.0):
        transform = build("random_apply", transforms=[FLIP, INVERT], p=p)
        assert abs(share_of(transform, both) - p) <= error_of(p)
        assert abs(share_of(transform, IMAGE) - (1 - p)) <= error_of(p)


def test_random_choice_by_weights() -> None:
    choices = [[FLIP, INVERT], [], [UPSIDE_DOWN], [POSTERIZE]]
    transform = build("random_choice", choices=choices, weights=[1.0, 2.0, 5.0, 0.0])
    for expected, share in ((255 - IMAGE[:, ::-1], 1 / 8), (IMAGE, 2 / 8), (IMAGE[::-1], 5 / 8)):
        assert abs(share_of(transform, expected) - share) < error_of(share)
    assert share_of(transform, IMAGE & 192) == 0
    evenly = build("random_choice", choices=choices)
    assert abs(share_of(evenly, IMAGE & 192) - 1 / 4) < error_of(1 / 4)


def test_random_order_uses_every_order() -> None:
    """Solarizing and inverting do not commute."""
    solarize = {"name": "solarize", "p": 1.0, "threshold": 100}
    transform = build("random_order", transforms=[solarize, POSTERIZE, INVERT])
    steps = [
        build(t["name"], **{k: v for k, v in t.items() if k != "name"})
        for t in (solarize, POSTERIZE, INVERT)
    ]

    def after(order: tuple[int, ...]) -> bytes:
        image = IMAGE
        for place in order:
            image = steps[place](image, rng())
        return image.tobytes()

    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    expected = Counter(after(order) for order in orders)
    draws = rng()
    results = Counter(transform(IMAGE, draws).tobytes() for _ in range(1200))
    assert set(results) == set(expected)
    assert len(expected) >= 4
    for result, count in expected.items():
        share = count / 6
        assert abs(results[result] / 1200 - share) < error_of(share, 1200)


def test_later_ones_draw_for_the_size_that_earlier_ones_left() -> None:
    """A crop to 8 pixels, then a hole somewhere in these: every place is hit."""
    hole = {"name": "cutout", "length": 1, "fill": 0}
    lists: list[Any] = [CROP, hole]
    for name, args in (
        ("random_apply", {"transforms": lists, "p": 1.0}),
        ("random_choice", {"choices": [lists]}),
    ):
        transform, draws = build(name, **args), rng()
        hits = np.zeros((8, 8))
        for _ in range(600):
            hits += (transform(np.full_like(IMAGE, 9), draws) == 0).all(axis=2)
        assert hits.sum() == 600
        assert hits.min() > 0


def test_nested_in_nested_and_in_worker_processes() -> None:
    inner = {"name": "random_choice", "choices": [[FLIP], [INVERT]], "weights": [0.0, 1.0]}
    transform = build("random_apply", transforms=[inner, UPSIDE_DOWN], p=1.0)
    assert np.array_equal(transform(IMAGE, rng()), 255 - IMAGE[::-1])
    again = pickle.loads(pickle.dumps(transform))
    assert np.array_equal(again(IMAGE, rng()), 255 - IMAGE[::-1])


RECIPE = """
defaults: [simclr/digits, _self_]
views:
  main:
    count: 2
    transforms:
      - name: random_apply
        p: 0.8
        transforms:
          - horizontal_flip
          - {name: random_resized_crop, size: 28}
      - name: random_choice
        weights: [1, 3]
        choices:
          - [posterize, {name: cutout, length: 4}]
          - []
      - {name: resize, size: 28}
      - normalize
"""


def written(tmp_path: Path, *edits: tuple[str, str]) -> str:
    text = RECIPE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return str(path)


def test_a_config_with_nested_transforms(tmp_path: Path) -> None:
    config = load_config(written(tmp_path), ["views.main.transforms.0.transforms.1.size=20"])
    outer, choice = config.views["main"].transforms[:2]
    assert outer.args["transforms"][0] == {"name": "horizontal_flip", "p": 0.5}
    assert outer.args["transforms"][1]["size"] == 20
    assert [t["name"] for t in choice.args["choices"][0]] == ["posterize", "cutout"]
    assert choice.args["choices"][1] == []
    place = config.place("views.main.transforms.0.transforms.0.name")
    assert re.search(r"my\.yaml:10$", place)
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(config))
    assert load_config(str(path), []).views == config.views
    views = Views(config.views)(np.zeros((40, 50, 3), dtype=np.uint8), 0, 0, 0)
    assert [view.dtype for view in views] == [np.uint8] * 2


CROP_LINE = "size: 28}\n      - name"
MISTAKES: dict[str, dict[tuple[str, str], str]] = {  # by what is replaced: the message
    "names": {
        (
            "- horizontal_flip",
            "- horizontal_flop",
        ): r"my\.yaml:10: no transform named 'horizontal_flop'; did you mean 'horizontal_flip'\?",
        (
            CROP_LINE,
            CROP_LINE.replace("size", "siz"),
        ): r"my\.yaml:11: unknown key '.*\.0\.transforms\.1\.siz' of random_.* mean '.*\.size'\?",
        (
            "length: 4",
            "lenght: 4",
        ): r"my\.yaml:15: unknown key '.*\.1\.choices\.0\.1\.lenght' of cutout",
    },
    "types": {
        ("length: 4", "length: long"): r"choices\.0\.1\.length='long': expected a whole number",
    },
    "limits": {
        ("length: 4", "length: 0"): r"my\.yaml:15: .*choices\.0\.1\.length=0: must be at least 1",
        (CROP_LINE, CROP_LINE.replace("28", "-1")): r"my\.yaml:11: .*size=-1: must be at least 1",
        ("p: 0.8", "p: 8"): r"my\.yaml:8: .*transforms\.0\.p=8: must be at most 1",
    },
    "no list": {
        (
            "[posterize, {name: cutout, length: 4}]",
            "posterize",
        ): r"choices\.0='posterize': expected a list of transforms",
    },
    "values": {
        ("[1, 3]", "[1]"): r"my\.yaml:13: .*weights: 1 numbers for 2 choices",
        (
            "- horizontal_flip",
            "- normalize",
        ): r"my\.yaml:10: .*transforms\.0\.transforms\.0: normalize is for the end",
    },
    "more values": {
        ("[1, 3]", "[0, 0]"): r"weights: \[0\.0, 0\.0\]; none below 0",
        ("[posterize,", "[normalize,"): r"my\.yaml:15: .*choices\.0\.0: normalize is for the end",
    },
}


@pytest.mark.parametrize("mistakes", MISTAKES.values(), ids=MISTAKES)
def test_messages_name_the_nested_key(tmp_path: Path, mistakes: dict[tuple[str, str], str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, *mistakes), [])
    for message in mistakes.values():
        assert re.search(message, str(caught.value)), caught.value


@pytest.mark.parametrize(
    "messages",
    [
        {
            "{name: random_apply}": r"transforms\.0\.transforms is missing: a list of transforms",
            "{name: random_choice, choices: 3}": r"choices=3: expected a list of lists of transf",
            "{name: random_order, transforms: [{nam: a}]}": r"transforms\.0 needs the name of a",
        },
        {
            "{name: random_apply, transforms: []}": r"0\.transforms: there is none; at least one",
            "{name: random_order, transforms: []}": r"1\.transforms: there is none; at least one",
            "{name: random_choice, choices: []}": r"choices: there is none; at least one list",
        },
    ],
)
def test_messages_for_lists_that_are_none(tmp_path: Path, messages: dict[str, str]) -> None:
    path = tmp_path / "my.yaml"
    text = f"views: {{main: {{count: 2, transforms: [{', '.join(messages)}, normalize]}}}}\n"
    path.write_text("defaults: [simclr/digits, _self_]\n" + text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), [])
    for message in messages.values():
        assert re.search(message, str(caught.value)), caught.value


def test_the_check_of_a_recipe_makes_nested_sizes_small_too(tmp_path: Path) -> None:
    edits = (("size: 28}\n      - name", "size: 224}\n      - name"),)
    config = load_config(written(tmp_path, *edits), ["views.main.transforms.2.size=224"])
    small = _small_views(config.views)["main"].transforms
    assert small[0].args["transforms"][1]["size"] == small[2].args["size"] == 32
    assert small[1].args["choices"] == config.views["main"].transforms[1].args["choices"]
