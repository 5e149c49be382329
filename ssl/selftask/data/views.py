"""From one image to its views; the draws depend on (seed, epoch, sample, view) alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from selftask.data.draws import ViewDraws
from selftask.data.transforms.normalize import to_float
from selftask.errors import ConfigError
from selftask.registry import TRANSFORMS

if TYPE_CHECKING:
    from selftask.config.schema import Component, ViewConfig

_TAKE_ARRAYS = ("contrast_noise", "normalize")  # and give arrays: no image comes after them


class Pipeline:
    """Transforms in sequence: an RGB image in, a float32 tensor (3, H, W) out."""

    def __init__(self, transforms: Iterable[Any]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> torch.Tensor:
        value: Any = image
        for transform in self.transforms:
            value = transform(value, rng)
        return torch.from_numpy(to_float(value))


class Views:
    """All views of an image, in the order of the config, each group ``count`` times."""

    def __init__(self, views: Mapping[str, ViewConfig]) -> None:
        self.pipelines: list[Pipeline] = []
        for name, view in views.items():
            pipeline = build_pipeline(view.transforms, key=f"views.{name}.transforms")
            self.pipelines += [pipeline] * view.count
        if not self.pipelines:
            raise ConfigError(["views: there is none; at least one group of views is needed"])
        self._draws: ViewDraws | None = None
        self._seed: int | None = None

    def __len__(self) -> int:
        return len(self.pipelines)

    def __call__(self, image: Image.Image, seed: int, epoch: int, index: int) -> list[torch.Tensor]:
        """V float32 tensors (3, H, W)."""
        if self._draws is None or self._seed != seed:
            self._draws, self._seed = ViewDraws(seed), seed
        return [
            pipeline(image, self._draws.at(epoch, index, view))
            for view, pipeline in enumerate(self.pipelines)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_draws": None}


def build_pipeline(transforms: Iterable[Component], key: str = "transforms") -> Pipeline:
    """The pipeline of a config's list of transforms; raises ConfigError for an impossible order.

    ``key`` is the list's place in the config, for the message.
    """
    built: list[Any] = []
    array_maker = None  # after it there are floats instead of an image
    for position, component in enumerate(transforms):
        if array_maker is not None and component.name not in _TAKE_ARRAYS:
            problem = (
                f"{key}[{position}]: {component.name} works on 8-bit images and cannot come after "
                f"{array_maker}; put it before"
            )
            raise ConfigError([problem])
        if component.name in _TAKE_ARRAYS:
            array_maker = component.name
        built.append(TRANSFORMS[component.name](**component.args))
    return Pipeline(built)
