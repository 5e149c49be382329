"""Transforms of the user: their results are checked, and name file and line if they are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from selftask.config.schema import Component
from selftask.data.transforms.pipeline import Compose, build_pipeline
from selftask.data.transforms.transform import Transform
from selftask.errors import ConfigError, UserError
from selftask.random.views import draw_rng
from selftask.registry import TRANSFORMS

IMAGE = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Own:
    result: Any

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> Any:
        return self.result(image)


@dataclass(frozen=True)
class OwnTransform(Transform):
    result: Any

    def draw(self, rng: np.random.Generator, height: int, width: int) -> int:
        return 0

    def apply(self, image: np.ndarray, params: int) -> Any:
        return self.result(image)


@pytest.mark.parametrize("kind", [Own, OwnTransform])
@pytest.mark.parametrize(
    ("result", "description"),
    [
        (lambda image: None, "None"),
        (lambda image: image.tolist(), "a list"),
        (lambda image: image.transpose(2, 0, 1), r"a ndarray of uint8 \(3, 6, 5\)"),
        (lambda image: image[..., 0], r"a ndarray of uint8 \(6, 5\)"),
        (lambda image: image / 255.0, r"a ndarray of float64 \(6, 5, 3\)"),
        (lambda image: image[:0], r"a ndarray of uint8 \(0, 5, 3\)"),
    ],
)
def test_a_result_that_is_no_image_is_named(kind: Any, result: Any, description: str) -> None:
    match = rf"test_own_transforms.py:\d+: the transform {kind.__name__} returned {description}; an"
    with pytest.raises(UserError, match=match):
        Compose([kind(result)])(IMAGE, draw_rng(0, 0, 0, 0))


def test_an_image_cannot_be_changed_in_place() -> None:
    """The second view of an image, and its next epoch, would show the change."""

    def darken(image: np.ndarray) -> np.ndarray:
        image //= 2
        return image

    before = IMAGE.copy()
    with pytest.raises(ValueError, match="read-only"):
        Compose([Own(darken)])(IMAGE, draw_rng(0, 0, 0, 0))
    assert np.array_equal(IMAGE, before) and IMAGE.flags.writeable
    copied = Compose([Own(lambda image: image // 2)])
    assert np.array_equal(copied(IMAGE, draw_rng(0, 0, 0, 0)), IMAGE // 2)


class OneArgument:
    def __call__(self, image: np.ndarray) -> np.ndarray:
        return image


class WithArgument:
    def __init__(self, factor: float) -> None: ...


class NotCallable:
    def forward(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return image


def plain_function(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return image


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (OneArgument, r"the transform OneArgument is called with \(image, rng\), and takes \(ima"),
        (WithArgument, r"own_wrong, which is no dataclass, .* and takes \(factor: 'float'\)"),
        (NotCallable, r"NotCallable has no __call__\(self, image, rng\)"),
        (plain_function, "is a function; register a dataclass with __call__"),
    ],
)
def test_what_cannot_be_called_is_an_error_of_the_config(
    entry: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSFORMS._registered, "own_wrong", entry)
    match = rf"transforms.0: .*test_own_transforms.py:\d+: .*{message}"
    with pytest.raises(ConfigError, match=match):
        build_pipeline([Component(name="own_wrong")])
