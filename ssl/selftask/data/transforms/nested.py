"""Transforms that apply other transforms: random_apply, random_choice and random_order.

The parameters of a transform may depend on the image size after the transform before it. Therefore
these classes draw and apply one transform at a time, instead of drawing all parameters first like
``Transform``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from selftask.config.fields import setting
from selftask.config.schema import Component
from selftask.data.transforms.channels import for_channels, list_problems
from selftask.data.transforms.pipeline import Compose
from selftask.data.transforms.transform import Drawn, Nested
from selftask.registry import TRANSFORMS, register_transform

_OUTERMOST = {"normalize": "the end of the outermost list", "tile": "the outermost list"}


@dataclass(frozen=True, kw_only=True)
class _OneList(Nested):
    """Transform with one list of transforms, which must not be empty."""

    transforms: list[Any] = setting(of="transforms")
    """List of transforms, at least one."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not self.transforms:
            yield "transforms: there is none; at least one is needed"
        yield from _misplaced(self.transforms, "transforms")

    def channel_problems(self, channels: int) -> Iterator[str]:
        return list_problems(_components(self.transforms), "transforms", channels)


@register_transform("random_apply")
@dataclass(frozen=True, kw_only=True)
class RandomApply(_OneList):
    """Apply all transforms of a list with probability p, otherwise none."""

    is_random: ClassVar[bool | str] = "p"

    p: float = setting(0.5, min=0, max=1)
    """Probability that the list is applied."""

    def __call__(
        self, image: np.ndarray, rng: np.random.Generator, steps: list[Drawn] | None = None
    ) -> np.ndarray:
        return self.pipeline(image, rng, steps=steps) if rng.random() < self.p else image

    def inner(self) -> list[Any]:
        return self.pipeline.transforms

    @cached_property
    def pipeline(self) -> Compose:
        """Pipeline of ``transforms``."""
        return Compose(_build(self.transforms), self.channels)


@register_transform("random_choice")
@dataclass(frozen=True, kw_only=True)
class RandomChoice(Nested):
    """Apply one of several lists of transforms; an empty list leaves the image unchanged."""

    choices: list[list[Any]] = setting(of="transforms")
    """Lists of transforms, one of which is drawn for each view."""
    weights: list[float] | None = None
    """Relative probabilities of the lists; null: all are equally likely."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not self.choices:
            yield "choices: there is none; at least one list of transforms is needed"
        for number, choice in enumerate(self.choices):
            yield from _misplaced(choice, f"choices.{number}")
        if self.weights is not None:
            if len(self.weights) != len(self.choices):
                yield f"weights: {len(self.weights)} numbers for {len(self.choices)} choices"
            if min(self.weights, default=0) < 0 or not sum(self.weights) > 0:
                yield f"weights: {self.weights}; none below 0 and not all of them 0"

    def channel_problems(self, channels: int) -> Iterator[str]:
        for number, choice in enumerate(self.choices):
            yield from list_problems(_components(choice), f"choices.{number}", channels)

    def __call__(
        self, image: np.ndarray, rng: np.random.Generator, steps: list[Drawn] | None = None
    ) -> np.ndarray:
        chosen = int(np.searchsorted(self.shares, rng.random(), side="right"))
        return self.pipelines[chosen](image, rng, steps=steps)

    def inner(self) -> list[Any]:
        return [transform for pipeline in self.pipelines for transform in pipeline.transforms]

    @cached_property
    def pipelines(self) -> list[Compose]:
        """Pipelines, one for each choice."""
        return [Compose(_build(choice), self.channels) for choice in self.choices]

    @cached_property
    def shares(self) -> np.ndarray:
        """Cumulative probabilities of all choices but the last, (num_choices - 1,)."""
        sums = np.cumsum([1.0] * len(self.choices) if self.weights is None else self.weights)
        return sums[:-1] / sums[-1]


@register_transform("random_order")
@dataclass(frozen=True, kw_only=True)
class RandomOrder(_OneList):
    """Apply all transforms of a list, in random order."""

    def __call__(
        self, image: np.ndarray, rng: np.random.Generator, steps: list[Drawn] | None = None
    ) -> np.ndarray:
        order = np.argsort(rng.random(len(self.transforms)))
        pipeline = Compose((self.built[index] for index in order), self.channels)
        return pipeline(image, rng, steps=steps)

    def inner(self) -> list[Any]:
        return self.built

    @cached_property
    def built(self) -> list[Any]:
        """Instances of ``transforms``."""
        return [for_channels(each, self.channels) for each in _build(self.transforms)]


def _misplaced(transforms: list[Any], key: str) -> Iterator[str]:
    """Yield a problem for each transform that is for the outermost list only."""
    for position, transform in enumerate(transforms):
        if transform["name"] in _OUTERMOST:
            yield f"{key}.{position}: {transform['name']} is for {_OUTERMOST[transform['name']]}"


def _components(transforms: list[Any]) -> Iterator[Component]:
    return map(Component.from_dict, transforms)


def _build(transforms: list[Any]) -> Iterator[Any]:
    """Build the transforms of a list of ``{name: ..., **args}``."""
    return (TRANSFORMS[each.name](**each.args) for each in _components(transforms))
