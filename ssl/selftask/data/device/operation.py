"""Base classes of batched transforms, and functions for their implementation.

The parameters come from ``Transform.draw``. ``pack`` runs in a worker and turns the parameters of a
batch into arrays. ``apply`` runs on the device. It must not wait for the device, so that it can run
ahead of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from selftask.data.transforms.transform import SCALARS
from selftask.errors import UserError
from selftask.registry import BATCHED_TRANSFORMS

if TYPE_CHECKING:
    from selftask.random.views import Streams

Arrays = dict[str, np.ndarray]  # parameters by name, (B, ...) each
Tensors = Mapping[str, Tensor]  # the same on the device; float32, uint8 or int16


@dataclass(frozen=True)
class Images:
    """A batch of images between two operations."""

    values: Tensor  # (B, C, H, W) float32, whole levels 0..255
    sizes: Tensor | None = None  # (B, 2) height and width in the canvas; None: images fill it
    dense: bool = True  # change all images, then select: no shape depends on a parameter

    def with_values(self, values: Tensor, sizes: Tensor | None = None) -> Images:
        """Return a batch with other values and sizes; ``sizes`` None: images fill the canvas."""
        return replace(self, values=values, sizes=sizes)


class Operation(ABC):
    """Base class of batched transforms."""

    ragged = False  # True if it accepts images of different sizes
    in_place = True  # True if it may write into the given values
    vectorised = True  # True if ``draw`` is implemented, which draws for a whole batch at once

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def draw_for(self, rng: np.random.Generator, height: int, width: int) -> Any:
        """Draw parameters for one image of this size."""
        return self.transform.draw(rng, height, width)

    def transforms(self) -> Iterator[Any]:
        """Yield the transform, or the transforms nested in it."""
        yield self.transform

    def applied(self, params: Any, height: int, width: int) -> Iterator[tuple[Any, Any, int, int]]:
        """Yield each transform that changes the image, its params, and the image size before it."""
        if params is not None:
            yield self.transform, params, height, width

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        """Return height and width after the operation."""
        return height, width

    def sizes_after(self, sizes: np.ndarray, packed: Any) -> np.ndarray:
        """Return the sizes (B, 2) after the operation; ``packed`` is the result of ``pack``."""
        if (sizes == sizes[0]).all():
            return np.tile(self.size_after(*sizes[0].tolist()), (len(sizes), 1))
        different, which = np.unique(sizes, axis=0, return_inverse=True)
        after = [self.size_after(height, width) for height, width in different.tolist()]
        return np.array(after, dtype=np.int64)[which.ravel()]

    @abstractmethod
    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Any:
        """Turn parameters into arrays for ``apply``.

        Args:
            params: Parameters of each image, from ``draw_for``.
            sizes: Height and width of the images, int64 (B, 2).
        """

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        """Do ``draw_for`` and ``pack`` for all images at once; only if ``vectorised``.

        It takes the same draws from each image's stream as ``Transform.draw``.
        """
        raise NotImplementedError(f"{type(self).__name__} draws for one image at a time")

    @abstractmethod
    def apply(self, images: Images, packed: Any, canvas: tuple[int, int]) -> Images:
        """Return the changed images.

        Args:
            images: The batch.
            packed: The arrays of ``pack``, on the device of the images.
            canvas: Largest height and width of the images afterwards.
        """


class UniformOperation(Operation):
    """Base class of the batched versions of ``UniformTransform``s."""

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        half = [0.5] * self.transform.num_uniforms
        _, other = self.transform.params_of(half, *sizes[0].tolist(), SCALARS)
        chosen = np.array([one is not None for one in params])
        columns = np.array([other if one is None else one for one in params], dtype=np.float64).T
        return self.arrays(chosen, columns, sizes)

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        uniforms = streams.random(self.transform.num_uniforms).T
        chosen, params = self.transform.params_of(uniforms, *sizes.T, np)
        return self.arrays(chosen, params, sizes)

    @abstractmethod
    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        """Return the arrays that ``apply`` needs.

        Args:
            chosen: Which images are changed, bool (B,), or True for all.
            params: Parameters from ``UniformTransform.params_of``, (B,) each. Unchanged images have
                valid parameters too.
            sizes: Height and width of the images, int64 (B, 2).
        """


class RandomlyApplied(UniformOperation):
    """Base class of batched transforms that are applied with probability ``p``."""

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        return {"chosen": chosen}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return on_chosen(images, packed["chosen"], self.change)

    @abstractmethod
    def change(self, values: Tensor) -> Tensor:
        """Return the changed values (B, C, H, W); may write into the given ones."""


class OwnOperation(Operation):
    """User's transform with a method ``on_batch``, which keeps the size of the images.

    ``on_batch(images, params)`` gets float32 images (B, C, H, W) in 0..255, and a list with the
    result of ``draw`` for each image (None: unchanged). It returns the changed images, which are
    then rounded to whole levels. It must not wait for the device (no ``.item()``).
    """

    in_place = False
    vectorised = False

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> list[Any]:
        return list(params)

    def apply(self, images: Images, packed: Any, canvas: tuple[int, int]) -> Images:
        changed = self.transform.on_batch(images.values, packed)
        if changed.shape != images.values.shape:
            raise UserError(
                f"{type(self.transform).__name__}.on_batch gave shape {tuple(changed.shape)} for "
                f"{tuple(images.values.shape)}; the shape has to stay (data.augment_on=cpu has no "
                "such limit)"
            )
        return images.with_values(to_levels(changed.float()))


def find_batched_transform(name: str, transform: Any) -> Operation:
    """Return the batched version of a transform that is registered as ``name``.

    A method ``on_batch`` of the transform has priority. Otherwise the version is found by name, not
    by class: a subclass of a built-in transform may draw or do something else.
    """
    if hasattr(transform, "on_batch"):
        return OwnOperation(transform)
    form: Operation = BATCHED_TRANSFORMS[name](transform)
    return form


def to_levels(values: Tensor) -> Tensor:
    """Round to whole levels and clip to 0..255, in place."""
    return values.round_().clamp_(0, 255)


def on_chosen(
    images: Images, chosen: Tensor, change: Callable[..., Tensor], *parameters: Tensor
) -> Images:
    """Apply ``change(values, *parameters)`` to the images whose ``chosen`` (B,) is not zero.

    If ``images.dense``, all images are changed and the result is selected for the chosen ones.
    Otherwise only the chosen images are changed, in place.
    """
    values = images.values
    if images.dense:
        changed = change(values.clone(), *parameters)
        return replace(images, values=torch.where(per_image(chosen) != 0, changed, values))
    rows = chosen.nonzero()[:, 0]
    if len(rows) == len(values):
        return replace(images, values=change(values, *parameters))
    if len(rows):
        values[rows] = change(values[rows], *(parameter[rows] for parameter in parameters))
    return replace(images, values=values)


def fitted(values: Tensor, canvas: tuple[int, int]) -> Tensor:
    """Pad with zeros or cut ``values`` (B, C, H, W) to this height and width."""
    height, width = values.shape[2:]
    if (height, width) == canvas:
        return values
    return pad(values, (0, canvas[1] - width, 0, canvas[0] - height))


def per_image(parameter: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, 1, 1)."""
    return parameter[:, None, None, None]
