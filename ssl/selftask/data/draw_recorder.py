"""Augmentation parameters of each view, added to the batch as numbers on request.

They are taken from the ``Trace`` of each view, which is written when the view is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from selftask.batch import Draws
from selftask.config.schema import Component, ViewConfig
from selftask.data.transforms.transform import UNMOVED, Matrix, Nested, Trace, Transform, after
from selftask.data.views import View, Views
from selftask.errors import ConfigError
from selftask.registry import TRANSFORMS


@dataclass(frozen=True)
class _Recorded:
    """View whose draws are requested."""

    number: int
    names: dict[str, Transform]  # transforms that report numbers, by their names in a batch


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
        self.recorded = [
            _Recorded(number, _transforms(view, config[view.group].transforms))
            for number, view in enumerate(self.made)
            if view.shown and view.group in asked
        ]

    def row(self, images: Sequence[tuple[int, int]], traces: Sequence[Trace]) -> np.ndarray:
        """Return the numbers of one sample, float32 (N,).

        They are, for each recorded view, the height and width of its image in pixels, the six
        entries of ``Draws.matrix``, row by row, and the ``numbers`` of its transforms.

        Args:
            images: Height and width of each image of the sample: the main image, then those of
                ``Views.images``, in order.
            traces: Draws of each view, including those that are only inputs of other views.
        """
        matrices: list[Matrix] = []
        sizes: list[tuple[int, int]] = []  # of the image that each view is made from
        for view, trace in zip(self.made, traces, strict=True):
            matrix = UNMOVED if view.of is None else matrices[view.of]
            for transform, params, size in trace.steps:
                if params is not None:
                    matrix = after(transform.source_matrix(params, *size), matrix)
            matrices.append(matrix)
            sizes.append(images[view.image] if view.of is None else sizes[view.of])
        numbers: list[float] = []
        for one in self.recorded:
            trace = traces[one.number]
            numbers += sizes[one.number]
            numbers += _of_unit_square(matrices[one.number], *trace.size)
            params_of = {id(step.transform): step.params for step in trace.steps}
            for transform in one.names.values():
                numbers += transform.numbers(params_of.get(id(transform)))
        return np.array(numbers, dtype=np.float32)

    def unpack(self, rows: Tensor) -> dict[str, list[Draws]]:
        """Return the draws of a batch, by group and for each of its views, from rows (B, N)."""
        groups: dict[str, list[Draws]] = {}
        start = 0
        for one in self.recorded:
            size, start = rows[:, start : start + 2], start + 2
            matrix, start = rows[:, start : start + 6].view(-1, 2, 3), start + 6
            params = {}
            for name, transform in one.names.items():
                length = _length(transform)
                params[name], start = rows[:, start : start + length], start + length
            draws = Draws(matrix=matrix, image_size=size, params=params)
            groups.setdefault(self.made[one.number].group, []).append(draws)
        return groups


def _transforms(view: View, components: list[Component]) -> dict[str, Transform]:
    """Return the transforms of a view that report numbers, by their names in a batch.

    Raises:
        ConfigError: If a transform follows a callable, which may move pixels anywhere.
    """
    names: dict[str, Transform] = {}
    callable_name = ""
    for component, transform in zip(components, view.pipeline.transforms, strict=False):
        if callable_name:
            problem = (
                f"views.{view.group}.transforms: what is drawn after {callable_name!r} is not "
                "known, and the draws of this group are asked for; put it last, or derive it from "
                "Transform"
            )
            raise ConfigError([problem])
        for one in _flat(transform):
            if not isinstance(one, Transform):
                callable_name = component.name
            elif _length(one):
                name = _registered_name(one)
                same = sum(type(other) is type(one) for other in names.values())
                names[f"{name}_{same + 1}" if same else name] = one
    return names


def _flat(transform: Any) -> Iterator[Any]:
    """Yield a transform, or the transforms nested in it."""
    if isinstance(transform, Nested):
        for inner in transform.inner():
            yield from _flat(inner)
    else:
        yield transform


def _registered_name(transform: Transform) -> str:
    return next(name for name in TRANSFORMS if TRANSFORMS.imported(name) is type(transform))


def _length(transform: Transform) -> int:
    return len(transform.numbers(None))


def _of_unit_square(matrix: Matrix, height: int, width: int) -> Matrix:
    """Return the matrix for view coordinates in [0, 1] instead of pixels."""
    a, b, c, d, e, f = matrix
    return a * width, b * height, c, d * width, e * height, f
