"""What the batched form of a transform is, and where those of the built-in ones are found.

The draws are those of ``Transform.draw``; only who applies them differs. So a batched form has two
halves: ``pack`` runs in a worker and turns the draws of a batch into arrays, ``apply`` runs on the
device and never asks the host anything, so that it can be compiled and run ahead of the step.
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

Arrays = dict[str, np.ndarray]  # parameters by name, (B, ...) each, one entry an image
Tensors = Mapping[str, Tensor]  # the same on the device: float32, or the bytes that they were


@dataclass(frozen=True)
class Images:
    """A batch of images between two operations."""

    values: Tensor  # (B, C, H, W) float32, whole levels 0..255
    sizes: Tensor | None = None  # (B, 2) height and width in the canvas; None: they all fill it
    dense: bool = True  # change all and choose afterwards: no shape depends on a draw

    def with_values(self, values: Tensor, sizes: Tensor | None = None) -> Images:
        """Other images, which fill their canvas unless ``sizes`` are given."""
        return replace(self, values=values, sizes=sizes)


class Operation(ABC):
    """The batched form of one transform."""

    ragged = False  # whether it takes images of different sizes
    in_place = True  # whether it may write into the values that it is given
    vectorised = True  # whether ``draw`` draws for many images at once

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def draw_for(self, rng: np.random.Generator, height: int, width: int) -> Any:
        """What the cpu engine draws for one image of that size."""
        return self.transform.draw(rng, height, width)

    def transforms(self) -> Iterator[Any]:
        """The transform, or those inside of it."""
        yield self.transform

    def applied(self, params: Any, height: int, width: int) -> Iterator[tuple[Any, Any, int, int]]:
        """Yield each transform that changes the image, its params, and the size before it."""
        if params is not None:
            yield self.transform, params, height, width

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        """Height and width of what is made of an image of that size."""
        return height, width

    def sizes_after(self, sizes: np.ndarray, packed: Any) -> np.ndarray:
        """``size_after`` for (B, 2) sizes, most of which are the same; ``packed`` is ``pack``'s."""
        if (sizes == sizes[0]).all():
            return np.tile(self.size_after(*sizes[0].tolist()), (len(sizes), 1))
        different, which = np.unique(sizes, axis=0, return_inverse=True)
        after = [self.size_after(height, width) for height, width in different.tolist()]
        return np.array(after, dtype=np.int64)[which.ravel()]

    @abstractmethod
    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Any:
        """What ``apply`` needs of the draws for B images of these ``sizes``, (B, 2) int64."""

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        """``pack`` of the draws for many images, all drawn at once, if this is ``vectorised``.

        Takes from each image's stream what ``Transform.draw`` would take.
        """
        raise NotImplementedError(f"{type(self).__name__} draws for one image at a time")

    @abstractmethod
    def apply(self, images: Images, packed: Any, canvas: tuple[int, int]) -> Images:
        """The changed images; ``packed`` are the arrays of ``pack`` on their device.

        ``canvas`` is the height and width that the largest of them has afterwards.
        """


class UniformOperation(Operation):
    """The batched form of a ``UniformTransform``."""

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
        """Return what ``apply`` needs of a batch.

        Args:
            chosen: which images are changed, bool (B,), or True for all.
            params: those of ``UniformTransform.params_of``, (B,) each; also for other images.
            sizes: height and width of the images, int64 (B, 2).
        """


class RandomlyApplied(UniformOperation):
    """The batched form of a transform that is applied with probability ``p``."""

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        return {"chosen": chosen}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return on_chosen(images, packed["chosen"], self.change)

    @abstractmethod
    def change(self, values: Tensor) -> Tensor:
        """(B, C, H, W) of the same; may write into what it is given."""


class OwnOperation(Operation):
    """A user's transform with a method ``on_batch``; the size of the images stays.

    ``on_batch(images, drawn)`` gets float32 (B, C, H, W) in 0..255 and a list of what its ``draw``
    gave for each image (None: it stays as it is), and returns the changed images. They are
    rounded to whole levels afterwards. It must not wait for the device (no ``.item()``).
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
    """The batched form of a transform that is registered as ``name``; a user's ``on_batch`` first.

    By the name alone: what a subclass of a built-in one draws or does may be something else.
    """
    if hasattr(transform, "on_batch"):
        return OwnOperation(transform)
    form: Operation = BATCHED_TRANSFORMS[name](transform)
    return form


def to_levels(values: Tensor) -> Tensor:
    """Rounded to whole levels and clipped to 0..255, in place."""
    return values.round_().clamp_(0, 255)


def on_chosen(
    images: Images, chosen: Tensor, change: Callable[..., Tensor], *parameters: Tensor
) -> Images:
    """``change(values, *parameters)`` for the images where ``chosen`` (B,) is not zero.

    Dense, all are changed and the right ones taken; else, on a host that knows its own values,
    only those are touched, in place.
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
    """With rows and columns added, or left out where no image reaches them."""
    height, width = values.shape[2:]
    if (height, width) == canvas:
        return values
    return pad(values, (0, canvas[1] - width, 0, canvas[0] - height))


def per_image(parameter: Tensor) -> Tensor:
    """(B,) as (B, 1, 1, 1), for products with images."""
    return parameter[:, None, None, None]
