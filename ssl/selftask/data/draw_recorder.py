"""Augmentation parameters of each view, as numbers in the batch if they are requested.

The parameters are a pure function of the seed, the sample's key and the image's size. So they are
drawn again here, and the code that makes the views records nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from selftask.batch import Draws
from selftask.config.checks.contradictions import unbatched
from selftask.config.schema import Component, ViewConfig
from selftask.data.device.compose import Chain
from selftask.data.device.operation import Operation, find_batched_transform
from selftask.data.transforms.transform import UNMOVED, Matrix, Transform, after
from selftask.data.views import View, Views
from selftask.errors import ConfigError
from selftask.random.views import ViewDraws
from selftask.registry import TRANSFORMS

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class _Recorded:
    """View whose draws are requested."""

    number: int
    names: dict[str, Transform]  # transforms that report numbers, by their names in a batch
    lengths: dict[str, int]


class DrawRecorder:
    """Recorder of the draws of some groups of views.

    ``row`` returns one row of numbers per sample; ``unpack`` turns a batch of rows into ``Draws``.

    Args:
        views: All views of an image.
        config: Config of each group of views, by name.
        asked: Names of the groups whose draws are requested.

    Raises:
        ConfigError: If a transform follows a callable whose draws are unknown.
    """

    name = "/draws"  # key of the rows in the extras of a sample

    def __init__(
        self,
        views: Views,
        config: Mapping[str, ViewConfig],
        asked: Collection[str],
    ) -> None:
        self.made = views.made
        self.chains = [
            Chain(list(_operations(view, config[view.group].transforms))) for view in self.made
        ]
        self.recorded = [
            _recorded(number, self.chains[number])
            for number, view in enumerate(self.made)
            if view.shown and view.group in asked
        ]
        self._draws: ViewDraws | None = None

    def row(
        self, given: Sequence[tuple[int, int]], seed: int, epoch: int, index: int
    ) -> np.ndarray:
        """Return the numbers of one sample, float32.

        Args:
            given: Height and width of each image of the sample, in the order of ``Views.images``.
            seed: Seed of the draws.
            epoch: First number of the sample's key.
            index: Second number of the sample's key.
        """
        if self._draws is None or self._draws.seed != seed:
            self._draws = ViewDraws(seed)
        images: list[tuple[int, int]] = []  # of the sample's image behind each view
        matrices: list[Matrix] = []
        sizes: list[tuple[int, int]] = []
        applied: list[list[tuple[Any, Any]]] = []
        for number, (view, chain) in enumerate(zip(self.made, self.chains, strict=True)):
            matrix = UNMOVED if view.of is None else matrices[view.of]
            images.append(given[view.image] if view.of is None else images[view.of])
            size = images[-1] if view.of is None else sizes[view.of]
            params = chain.draw_for(self._draws.at(epoch, index, number), *size)
            steps = list(chain.applied(params, *size))
            for transform, drawn, *before in steps:
                if isinstance(transform, Transform):
                    matrix = after(transform.source_matrix(drawn, *before), matrix)
            matrices.append(matrix)
            sizes.append(chain.size_after(*size, params))
            applied.append([(transform, drawn) for transform, drawn, *_ in steps])
        numbers: list[float] = []
        for one in self.recorded:
            numbers += images[one.number]
            numbers += _of_unit_square(matrices[one.number], *sizes[one.number])
            drawn = {id(transform): params for transform, params in applied[one.number]}
            for transform in one.names.values():
                numbers += transform.numbers(drawn.get(id(transform)))
        return np.array(numbers, dtype=np.float32)

    def unpack(self, rows: Tensor) -> dict[str, list[Draws]]:
        """Return the draws of a batch by group, from its rows (B, N)."""
        found: dict[str, list[Draws]] = {}
        at = 0
        for one in self.recorded:
            size, at = rows[:, at : at + 2], at + 2
            matrix, at = rows[:, at : at + 6].view(-1, 2, 3), at + 6
            params = {}
            for name, length in one.lengths.items():
                params[name], at = rows[:, at : at + length], at + length
            draws = Draws(matrix=matrix, image_size=size, params=params)
            found.setdefault(self.made[one.number].group, []).append(draws)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_draws": None}


class _DrawsOnly(Operation):
    """User's transform without a batched form; it only draws, and keeps the image size."""

    def pack(self, params: Any, sizes: np.ndarray) -> Any:
        raise NotImplementedError

    def apply(self, images: Any, packed: Any, canvas: tuple[int, int]) -> Any:
        raise NotImplementedError


def _operations(view: View, components: list[Component]) -> Iterator[Operation]:
    """Yield the transforms of a view as operations that draw, without callables at its end."""
    opaque = ""
    for component, transform in zip(components, view.pipeline.transforms, strict=False):
        batched = not list(unbatched({view.group: ViewConfig(transforms=[component])}))
        if not batched and not isinstance(transform, Transform):
            opaque = component.name
        elif opaque:
            problem = (
                f"views.{view.group}.transforms: what is drawn after {opaque!r} is not known, and "
                "the draws of this group are asked for; put it last, or derive it from Transform"
            )
            raise ConfigError([problem])
        else:
            yield (
                find_batched_transform(component.name, transform)
                if batched
                else _DrawsOnly(transform)
            )


def _recorded(number: int, chain: Chain) -> _Recorded:
    registered = {TRANSFORMS.imported(name): name for name in TRANSFORMS}
    names: dict[str, Transform] = {}
    for transform in chain.transforms():
        if isinstance(transform, Transform) and _length(transform):
            name = registered[type(transform)]
            same = sum(type(other) is type(transform) for other in names.values())
            names[f"{name}_{same + 1}" if same else name] = transform
    return _Recorded(number, names, {name: _length(one) for name, one in names.items()})


def _length(transform: Transform) -> int:
    return len(transform.numbers(None))


def _of_unit_square(matrix: Matrix, height: int, width: int) -> Matrix:
    """Return the matrix for view coordinates in [0, 1] instead of pixels."""
    a, b, c, d, e, f = matrix
    return a * width, b * height, c, d * width, e * height, f
