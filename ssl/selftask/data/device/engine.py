"""The engine: all views of a batch of pictures, made on the device from draws made elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import selftask.data.device.blur
import selftask.data.device.color
import selftask.data.device.crops
import selftask.data.device.geometry
import selftask.data.device.jitter  # noqa: F401 - each brings batched forms
from selftask.data.device.operation import Images, Operation, find_form
from selftask.data.device.streams import Streams
from selftask.data.draws import ViewDraws
from selftask.data.views import Views
from selftask.errors import ConfigError, UserError

if TYPE_CHECKING:
    from selftask.config.schema import ViewConfig

_CHUNK_BYTES = 1 << 24  # of pictures changed together on a CPU; less costs more calls than misses

Draws = list[list[Any]]  # of one picture: for each view, what each of its transforms drew


@dataclass(frozen=True)
class Step:
    """What one operation of one view needs of a batch, but for the numbers themselves."""

    canvas: tuple[int, int]  # height and width of the largest picture afterwards
    ragged: bool  # whether sizes differ before it
    places: dict[str, tuple[int, tuple[int, ...]]]  # name -> first number and shape
    own: list[Any] | None = None  # the draws of a user's transform, as they are


@dataclass(frozen=True)
class Packed:
    """The draws of a batch in one tensor, so that they travel in one copy."""

    numbers: Tensor  # (n,) float32
    steps: list[list[Step]]  # for each view, its operations

    def to(self, device: torch.device) -> Packed:
        """The same with the numbers on the device; the host does not wait."""
        return replace(self, numbers=self.numbers.to(device, non_blocking=True))

    def pin_memory(self) -> Packed:
        """The same with the numbers in page-locked memory."""
        return replace(self, numbers=self.numbers.pin_memory())

    def parameters(self, step: Step, rows: slice) -> Any:
        """What ``apply`` takes, for some of the pictures."""
        if step.own is not None:
            return step.own[rows]
        return {
            name: self.numbers[first : first + math.prod(shape)].view(shape)[rows]
            for name, (first, shape) in step.places.items()
        }


class Packer:
    """Collects the arrays of a batch and lays them out one after the other."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._length = 0

    def add(self, packed: Any, canvas: tuple[int, int], ragged: bool) -> Step:
        """Keep the arrays of one operation, and say where they are."""
        if isinstance(packed, list):
            return Step(canvas, ragged, {}, packed)
        places = {}
        for name, array in packed.items():
            places[name] = (self._length, array.shape)
            self._arrays.append(np.asarray(array, dtype=np.float32).ravel())
            self._length += array.size
        return Step(canvas, ragged, places)

    def finish(self, steps: list[list[Step]]) -> Packed:
        """All that was added, in one tensor."""
        numbers = np.concatenate(self._arrays) if self._arrays else np.zeros(0, np.float32)
        return Packed(torch.from_numpy(numbers), steps)


class Engine:
    """All views of a batch, by the batched forms of their transforms.

    In a worker, ``draw`` and ``pack``; on the device, a call. Raises ConfigError for transforms
    that have no batched form.
    """

    def __init__(
        self, views: Views, config: Mapping[str, ViewConfig], dense: bool | None = None
    ) -> None:
        """``dense`` chooses how pictures are changed that only some are; None: by the device."""
        self.views = _operations(views, config)
        self.to_float = [pipeline.to_float for pipeline in views.pipelines]
        self.dense = dense
        self._draws: ViewDraws | None = None

    def draw(self, height: int, width: int, seed: int, epoch: int, index: int) -> Draws:
        """What the cpu engine would draw for one picture of that size."""
        if self._draws is None or self._draws.seed != seed:
            self._draws = ViewDraws(seed)
        return self._draw(self._draws, (height, width), epoch, index)

    def _draw(self, draws: ViewDraws, whole: tuple[int, int], epoch: int, index: int) -> Draws:
        drawn = []
        for view, operations in enumerate(self.views):
            rng, size, of_view = draws.at(epoch, index, view), whole, []
            for operation in operations:
                of_view.append(operation.transform.draw(rng, *size))
                size = operation.size_after(*size)
            drawn.append(of_view)
        return drawn

    def pack(self, drawn: Sequence[Draws], sizes: np.ndarray) -> Packed:
        """The draws of a batch whose pictures have these sizes, (B, 2) int64.

        Raises UserError where pictures would have to be of one size and are not.
        """
        return self._lay_out(
            lambda view, at, operation, sizes: operation.pack([d[view][at] for d in drawn], sizes),
            sizes,
        )

    def draw_batch(
        self, seed: int, epochs: np.ndarray, indices: np.ndarray, sizes: np.ndarray
    ) -> Packed:
        """``draw`` and ``pack`` for a batch of samples, (B,) int64 each, of any sizes (B, 2).

        All pictures' draws at once, if every transform has a form for that.
        """
        if not all(operation.vectorised for view in self.views for operation in view):
            draws = ViewDraws(seed)  # of this call: others may draw at the same time
            keys = zip(map(tuple, sizes.tolist()), epochs.tolist(), indices.tolist(), strict=True)
            return self.pack([self._draw(draws, *key) for key in keys], sizes)
        streams = [Streams(seed, epochs, indices, view) for view in range(len(self.views))]
        return self._lay_out(
            lambda view, at, operation, sizes: operation.draw(streams[view], sizes), sizes
        )

    def _lay_out(
        self, pack: Callable[[int, int, Operation, np.ndarray], Any], sizes: Any
    ) -> Packed:
        """``pack(view, number, operation, sizes)`` of all operations, in one piece."""
        packer, steps = Packer(), []
        for view, operations in enumerate(self.views):
            of_view, now = [], sizes
            for at, operation in enumerate(operations):
                ragged = bool((now != now[0]).any())
                if ragged and not operation.ragged:
                    raise UserError(_sizes_differ(view, operation, now))
                packed = pack(view, at, operation, now)
                now = _sizes_after(operation, now)
                canvas = int(now[:, 0].max()), int(now[:, 1].max())
                of_view.append(packer.add(packed, canvas, ragged))
            if (now != now[0]).any():
                raise UserError(_sizes_differ(view, None, now))
            steps.append(of_view)
        return packer.finish(steps)

    def __call__(self, pixels: Tensor, sizes: Tensor | None, packed: Packed) -> list[Tensor]:
        """V views (B, 3, S, S) float32, normalised, of uint8 (B, H, W, 3), all on one device.

        ``sizes`` (B, 2) float32 are the pictures' heights and widths in their canvas, None where
        all fill it. Nothing here waits for the device.
        """
        on_host = pixels.device.type == "cpu"
        dense = (not on_host) if self.dense is None else self.dense
        rows = _rows_at_once(pixels, packed) if on_host else len(pixels)
        pieces = [
            self._views(pixels, sizes, packed, slice(first, first + rows), dense)
            for first in range(0, len(pixels), rows)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def _views(
        self, pixels: Tensor, sizes: Tensor | None, packed: Packed, rows: slice, dense: bool
    ) -> list[Tensor]:
        """All views of some of the pictures."""
        planes = pixels[rows].permute(0, 3, 1, 2)
        values = planes.to(torch.float32, memory_format=torch.contiguous_format)
        some = None if sizes is None else sizes[rows]
        views = []
        for view, operations in enumerate(self.views):
            images = Images(values, some, dense)
            for operation, step in zip(operations, packed.steps[view], strict=True):
                if images.values is values and operation.in_place:  # the other views need it too
                    images = replace(images, values=values.clone())
                if not step.ragged:
                    images = replace(images, sizes=None)
                images = operation.apply(images, packed.parameters(step, rows), step.canvas)
            views.append(self.to_float[view].of_planes(images.values))
        return views


def _operations(views: Views, config: Mapping[str, ViewConfig]) -> list[list[Operation]]:
    """For each view, the batched forms of its transforms; raises ConfigError for what has none."""
    operations: list[list[Operation]] = []
    problems = []
    for name, view in config.items():
        pipeline, forms = views.pipelines[len(operations)], []
        for at, transform in enumerate(pipeline.transforms):
            form = find_form(transform)
            if form is None:
                problems.append(
                    f"views.{name}.transforms[{at}]: {view.transforms[at].name} has no form for "
                    "whole batches; give it a method on_batch(images, drawn), or set "
                    "data.engine=cpu"
                )
            else:
                forms.append(form)
        operations += [forms] * view.count
    if problems:
        raise ConfigError(problems)
    return operations


def _sizes_after(operation: Operation, sizes: np.ndarray) -> np.ndarray:
    """``operation.size_after`` for (N, 2) sizes, most of which are the same."""
    if (sizes == sizes[0]).all():
        return np.tile(operation.size_after(*sizes[0].tolist()), (len(sizes), 1))
    different, which = np.unique(sizes, axis=0, return_inverse=True)
    after = [operation.size_after(height, width) for height, width in different.tolist()]
    return np.array(after, dtype=np.int64)[which.ravel()]


def _sizes_differ(view: int, operation: Operation | None, sizes: np.ndarray) -> str:
    found = sorted({f"{width}x{height}" for height, width in sizes.tolist()})
    listed = ", ".join(found[:3])
    if operation is None:
        return (
            f"view {view}: its images have different sizes ({listed}) and make no batch; its "
            "transforms need a crop (random_resized_crop or center_crop)"
        )
    return (
        f"view {view}: {type(operation.transform).__name__} comes before any crop, where images "
        f"have different sizes ({listed}); put a crop first, or set data.engine=cpu"
    )


def _rows_at_once(pixels: Tensor, packed: Packed) -> int:
    """How many pictures are changed together: as floats, so many bytes."""
    shapes = [step.canvas for steps in packed.steps for step in steps]
    largest = max(height * width for height, width in [*shapes, (pixels.shape[1], pixels.shape[2])])
    return max(1, _CHUNK_BYTES // (12 * largest))
