"""Sequences of operations: of a view, or of a list within a transform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selftask.data.device.operation import Images, Operation
from selftask.data.device.packing import Step, Steps, Tree
from selftask.errors import UserError

if TYPE_CHECKING:
    from selftask.random.views import Streams


class Chain:
    """Sequence of operations; the given images are not changed."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = list(operations)

    @property
    def vectorised(self) -> bool:
        """True if ``draw`` is available, which draws for a whole batch at once."""
        return all(operation.vectorised for operation in self.operations)

    def draw_for(self, rng: np.random.Generator, height: int, width: int) -> list[Any]:
        """Draw the parameters of each operation for one image of this size."""
        size, params = (height, width), []
        for operation in self.operations:
            params.append(operation.draw_for(rng, *size))
            size = operation.size_after(*size, params[-1])
        return params

    def size_after(self, height: int, width: int, params: Sequence[Any]) -> tuple[int, int]:
        """Return height and width of an image after all operations."""
        size = height, width
        for operation, one in zip(self.operations, params, strict=True):
            size = operation.size_after(*size, one)
        return size

    def transforms(self) -> Iterator[Any]:
        """Yield all transforms that draw, including nested ones."""
        for operation in self.operations:
            yield from operation.transforms()

    def applied(
        self, params: Sequence[Any], height: int, width: int
    ) -> Iterator[tuple[Any, Any, int, int]]:
        """Yield each transform that changes the image, its params, and the image size before it."""
        for operation, one in zip(self.operations, params, strict=True):
            yield from operation.applied(one, height, width)
            height, width = operation.size_after(height, width, one)

    def pack(self, params: Sequence[Sequence[Any]], sizes: np.ndarray) -> tuple[Steps, np.ndarray]:
        """Turn parameters into arrays.

        Args:
            params: Parameters of each image and operation, from ``draw_for``.
            sizes: Height and width of the images, int64 (B, 2).

        Returns:
            The arrays, and the sizes of the images afterwards.

        Raises:
            UserError: An operation needs images of equal size, and sizes differ.
        """
        return self.lay_out(
            lambda at, operation, now: operation.pack([one[at] for one in params], now), sizes
        )

    def draw(self, streams: Streams, sizes: np.ndarray) -> tuple[Steps, np.ndarray]:
        """Do ``draw_for`` and ``pack`` for all images at once; only if ``vectorised``."""
        return self.lay_out(lambda _, operation, now: operation.draw(streams, now), sizes)

    def lay_out(
        self, pack: Callable[[int, Operation, np.ndarray], Tree], sizes: np.ndarray
    ) -> tuple[Steps, np.ndarray]:
        """Do ``pack`` with the arrays of ``pack(number, operation, sizes)`` for each operation."""
        before, steps = canvas_of(sizes), []
        for at, operation in enumerate(self.operations):
            ragged = differ(sizes)
            if ragged and not operation.ragged:
                raise UserError(
                    f"{type(operation.transform).__name__} comes before any crop, and images "
                    f"have different sizes ({listed(sizes)}); put a crop first, or set "
                    "data.augment_on=cpu"
                )
            packed = pack(at, operation, sizes)
            sizes = operation.sizes_after(sizes, packed)
            steps.append(Step(packed, canvas_of(sizes), ragged))
        return Steps(before, tuple(steps)), sizes

    def apply(self, images: Images, steps: Steps) -> Images:
        """Apply all operations; ``steps`` come from ``pack`` and are on the device."""
        images = _narrowed(images, *steps.canvas)
        given = images.values
        for operation, step in zip(self.operations, steps.steps, strict=True):
            if operation.in_place and images.values is given:
                images = replace(images, values=given.clone())
            if not step.ragged:
                images = replace(images, sizes=None)
            images = operation.apply(images, step.packed, step.canvas)
        return images


def canvas_of(sizes: np.ndarray) -> tuple[int, int]:
    """Return the largest height and the largest width of sizes (B, 2)."""
    height, width = sizes.max(0).tolist()
    return height, width


def differ(sizes: np.ndarray) -> bool:
    """Return whether sizes (B, 2) differ."""
    return bool((sizes != sizes[0]).any())


def listed(sizes: np.ndarray) -> str:
    """Return up to three of the sizes as text, for a message."""
    return ", ".join(sorted({f"{width}x{height}" for height, width in sizes.tolist()})[:3])


def _narrowed(images: Images, height: int, width: int) -> Images:
    """Cut the canvas to this size, which must not be larger."""
    values, sizes = images.values, images.sizes
    if values.shape[2:] == (height, width):
        return images
    if sizes is not None:  # images of other branches may be larger
        sizes = torch.stack([sizes[:, 0].clamp(max=height), sizes[:, 1].clamp(max=width)], 1)
    return images.with_values(values[:, :, :height, :width], sizes)
