"""Device engine: makes the views of a batch on the device, from parameters drawn by the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.config.checks.views import is_unbatched
from selftask.config.schema import ViewConfig
from selftask.data.device.operation import Operation, find_batched_transform
from selftask.data.device.packing import Packed, ViewParameters, pack
from selftask.data.transforms.pipeline import Compose
from selftask.data.transforms.transform import Drawn, Trace
from selftask.data.views import View, Views
from selftask.errors import UserError
from selftask.random.views import Streams, ViewDraws


@dataclass(frozen=True)
class Program:
    """Steps that make a view: some transforms in the worker, the remaining ones on the device."""

    parent: int | None
    """Number of the view from which this one is made on the device; None: it is made from an image,
    ``image``.
    """
    image: int
    """Without a parent: index of the image from which the view is made, among those sent for a
    sample.
    """
    in_worker: Compose | None
    """Transforms up to the last one without a batched version; None if all have one."""
    operations: list[Operation]
    """Batched versions of the other transforms."""


@dataclass(frozen=True)
class Step:
    """Operation applied to several views at once, whose earlier steps are all the same."""

    number: int
    """Position of its arrays in ``Packed.steps``."""
    operation: Operation
    views: list[int]
    """Numbers of the views."""
    then: list[Step]
    """Next steps of these views, which may differ."""


class Engine:
    """Callable that makes all views of a batch with the batched versions of their transforms.

    Workers call ``prepare`` and ``pack``; ``__call__`` runs on the device. If a transform has no
    batched version, the worker applies all transforms up to and including it, and the result is
    sent to the device as an additional image.

    Args:
        views: Views of the CPU engine.
        config: Config of each group of views, by name.
    """

    def __init__(self, views: Views, config: Mapping[str, ViewConfig]) -> None:
        self.made = views.made
        self.to_float = views.to_float
        lengths = _num_in_worker(views.made, config)
        direct = any(
            length is None and view.of is None
            for view, length in zip(views.made, lengths, strict=True)
        )
        self.num_given = 1 + len(views.images) if direct else 0  # images that are sent as they are
        self.num_images = self.num_given  # I, sent for each sample
        self.programs: list[Program] = []
        for view, length in zip(views.made, lengths, strict=True):
            named = [*zip(config[view.group].transforms, view.pipeline.transforms, strict=False)]
            operations = [find_batched_transform(c.name, one) for c, one in named[length:]]
            if length is None:
                self.programs.append(Program(view.of, view.image, None, operations))
            else:
                in_worker = view.pipeline.first(length)
                self.programs.append(Program(None, self.num_images, in_worker, operations))
                self.num_images += 1
        from_same: dict[tuple[int | None, int], list[int]] = {}
        for number, program in enumerate(self.programs):
            from_same.setdefault((program.parent, program.image), []).append(number)
        self._num_steps = 0
        self._steps = [(views, self._plan(views, 0)) for views in from_same.values()]
        self._draws: ViewDraws | None = None

    def _plan(self, views: list[int], position: int) -> list[Step]:
        """Return the steps from ``position`` on, for views whose earlier steps are the same."""
        together: list[tuple[Operation, list[int]]] = []
        for view in views:
            for operation in self.programs[view].operations[position : position + 1]:
                same = [one for one in together if operation.same(one[0])]
                if same:
                    same[0][1].append(view)
                else:
                    together.append((operation, [view]))
        steps = []
        for operation, group in together:
            number = self._num_steps
            self._num_steps += 1
            steps.append(Step(number, operation, group, self._plan(group, position + 1)))
        return steps

    def prepare(
        self, images: Sequence[np.ndarray], seed: int, epoch: int, index: int
    ) -> tuple[list[np.ndarray], list[Trace]]:
        """Return the images to send for one sample, uint8 (H, W, C), and the draws of each view.

        Images that are sent unchanged come first, then those made by transforms in the worker. The
        draws are the same as those of the CPU engine.

        Args:
            images: Images of the sample, uint8 (H, W, C).
            seed: Seed of the run.
            epoch: First number of the sample's key.
            index: Second number of the sample's key.
        """
        if self._draws is None or self._draws.seed != seed:
            self._draws = ViewDraws(seed)
        sent = list(images[: self.num_given])
        in_worker: list[np.ndarray | None] = []
        traces: list[Trace] = []
        for number, (view, program) in enumerate(zip(self.made, self.programs, strict=True)):
            rng = self._draws.at(epoch, index, number)
            steps: list[Drawn] = []
            made = None
            if program.in_worker is not None:
                source = images[view.image] if view.of is None else in_worker[view.of]
                assert source is not None  # see _num_in_worker
                made = program.in_worker(source, rng, steps=steps)
                sent.append(made)
            in_worker.append(made)
            before = images[view.image].shape[:2] if view.of is None else traces[view.of].size
            size = before if made is None else made.shape[:2]
            traces.append(_draw(program.operations, rng, size, steps))
        return sent, traces

    def draw(
        self, sizes: Sequence[tuple[int, int]], seed: int, epoch: int, index: int
    ) -> list[Trace]:
        """Return the draws that ``prepare`` makes for images of these sizes.

        All transforms must have batched versions; others would need the pixels.

        Args:
            sizes: Height and width of each image of the sample.
            seed: Seed of the run.
            epoch: First number of the sample's key.
            index: Second number of the sample's key.
        """
        blank = [np.empty((*size, 0), dtype=np.uint8) for size in sizes]
        return self.prepare(blank, seed, epoch, index)[1]

    def pack(self, traces: Sequence[Sequence[Trace]], sizes: np.ndarray) -> Packed:
        """Pack the parameters of a batch into one tensor.

        Args:
            traces: Draws of each view of each sample.
            sizes: Height and width of the sent images, int64 (I*B, 2). If there are I > 1 for each
                sample, the first images of all samples come first.

        Raises:
            UserError: If images have different sizes before an operation that is no crop, or in a
                finished view.
        """

        def step(view: int, number: int, operation: Operation, sizes: np.ndarray) -> Any:
            last = number - len(self.programs[view].operations)  # counted from the end
            params = [trace[view].steps[last].params for trace in traces]
            return operation.pack(params, sizes)

        return self._pack(step, sizes)

    def draw_batch(
        self, seed: int, epochs: np.ndarray, indices: np.ndarray, sizes: np.ndarray
    ) -> Packed:
        """Do ``draw`` and ``pack`` for a batch, vectorized if all transforms support it.

        All transforms must have batched versions.

        Args:
            seed: Seed of the run.
            epochs: First numbers of the keys, int64 (B,).
            indices: Second numbers of the keys, int64 (B,).
            sizes: As for ``pack``.

        Raises:
            UserError: As ``pack``.
        """
        assert not any(program.in_worker for program in self.programs)  # checked with the config
        if all(one.vectorized for program in self.programs for one in program.operations):
            streams = [Streams(seed, epochs, indices, view) for view in range(len(self.made))]
            return self._pack(
                lambda view, _, operation, now: operation.draw(streams[view], now), sizes
            )
        by_sample: Any = sizes.reshape(self.num_images, -1, 2).swapaxes(0, 1).tolist()
        keys = zip(by_sample, epochs.tolist(), indices.tolist(), strict=True)
        return self.pack([self.draw(each, seed, *key) for each, *key in keys], sizes)

    def _pack(
        self, step: Callable[[int, int, Operation, np.ndarray], Any], sizes: np.ndarray
    ) -> Packed:
        """Pack the arrays of all operations of all views; raises UserError as ``pack``.

        Args:
            step: Called as ``step(view, position, operation, sizes)``; returns the arrays.
            sizes: As for ``pack``.
        """
        views: list[ViewParameters] = []
        images = np.split(sizes, self.num_images)
        after: list[np.ndarray] = []  # sizes of the views
        arrays: list[list[Any]] = []  # of each view, for each of its operations
        for number, program in enumerate(self.programs):
            parent, key = program.parent, f"views.{self.made[number].group}.transforms"
            now = before = images[program.image] if parent is None else after[parent]
            steps = []
            for position, operation in enumerate(program.operations):
                if _differ(now) and not operation.crops:
                    raise UserError(
                        f"{key}: {type(operation.transform).__name__} comes before any "
                        f"crop, and images have different sizes ({_listed(now)}); put a crop "
                        "first, or set data.augment_on=cpu"
                    )
                steps.append(step(number, position, operation, now))
                now = operation.sizes_after(now)
            if _differ(now):
                raise UserError(
                    f"{key}: images of different sizes ({_listed(now)}) make no batch; add a crop "
                    "(random_resized_crop or center_crop)"
                )
            height, width = before.max(0).tolist()
            views.append(ViewParameters((height, width), _differ(before)))
            after.append(now)
            arrays.append(steps)
        shown = (size for view, size in zip(self.made, after, strict=True) if view.shown)
        joined: list[Any] = [None] * self._num_steps
        for _, each in self._steps:
            _join(each, 0, arrays, joined)
        return pack(views, joined, [tuple(size.max(0).tolist()) for size in shown])

    def __call__(self, pixels: Tensor, sizes: Tensor | None, packed: Packed) -> list[Tensor]:
        """Make all views without waiting for the device.

        Args:
            pixels: uint8 (I*B, H, W, C).
            sizes: Height and width of the images in their canvas, float32 (I*B, 2); None: all
                images fill it.
            packed: The parameters, on the same device.

        Returns:
            V views, normalized float32 (B, C, H, W).
        """
        planes = pixels.permute(0, 3, 1, 2)
        values = planes.to(torch.float32, memory_format=torch.contiguous_format)
        images = values.chunk(self.num_images)
        each = [None] * self.num_images if sizes is None else sizes.chunk(self.num_images)
        made: dict[int, Tensor] = {}
        for views, steps in self._steps:
            view, program = packed.views[views[0]], self.programs[views[0]]
            now = images[program.image] if program.parent is None else made[program.parent]
            now = now[:, :, : view.canvas[0], : view.canvas[1]]
            made |= dict.fromkeys(views, now)
            ragged = each[program.image] if view.ragged else None
            _apply(steps, now, ragged, packed, made)
        shown = (made[number] for number, view in enumerate(self.made) if view.shown)
        return [to.of_planes(values) for to, values in zip(self.to_float, shown, strict=True)]


def _join(steps: list[Step], position: int, arrays: list[list[Any]], joined: list[Any]) -> None:
    """Interleave the arrays (B, ...) of a step's n views into (B * n, ...), image by image."""
    for step in steps:
        each = [arrays[view][position] for view in step.views]
        joined[step.number] = (
            each[0]
            if len(each) == 1
            else {
                name: np.stack([one[name] for one in each], 1).reshape(-1, *array.shape[1:])
                for name, array in each[0].items()
            }
        )
        _join(step.then, position + 1, arrays, joined)


def _apply(
    steps: Sequence[Step],
    images: Tensor,
    ragged: Tensor | None,
    packed: Packed,
    made: dict[int, Tensor],
) -> None:
    """Apply steps to images, and their next steps to the results; put all views into ``made``."""
    pending: list[tuple[Step, Tensor, Tensor | None]] = []
    for step in steps:
        times = 1 if step.operation.shares_images else len(step.views)
        sizes = None if ragged is None else _repeat(ragged, times)
        pending.append((step, _repeat(images, times), sizes))
    while pending:  # not recursive: callers would hold what is no longer needed
        step, values, sizes = pending.pop()
        values = step.operation.apply(values, packed.step(step.number), sizes)
        each = values.unflatten(0, (-1, len(step.views))).unbind(1)
        made |= zip(step.views, each, strict=True)
        for after in step.then:
            if after.views != step.views:
                values = torch.stack([made[view] for view in after.views], 1).flatten(0, 1)
            pending.append((after, values, None))  # only a crop accepts different sizes


def _repeat(values: Tensor, times: int) -> Tensor:
    """Repeat each row ``times`` times."""
    return values[:, None].expand(-1, times, *values.shape[1:]).flatten(0, 1)


def _num_in_worker(made: Sequence[View], config: Mapping[str, ViewConfig]) -> list[int | None]:
    """Return how many transforms of each view the worker applies; None: the device makes the view.

    If the worker makes a view from another one, it applies all transforms of that one, too.
    """
    numbers: list[int | None] = []
    for view in made:
        names = [component.name for component in config[view.group].transforms]
        unbatched = [position for position, name in enumerate(names) if is_unbatched(name)]
        numbers.append(unbatched[-1] + 1 if unbatched else None)
    for view, number in reversed([*zip(made, numbers, strict=True)]):
        if view.of is not None and number is not None:
            numbers[view.of] = len(made[view.of].pipeline.transforms)
    return numbers


def _draw(
    operations: Sequence[Operation],
    rng: np.random.Generator,
    size: tuple[int, int],
    steps: list[Drawn],
) -> Trace:
    """Append the draws of the operations to the worker's ``steps``; return them as a trace."""
    for operation in operations:
        transform = operation.transform
        steps.append(Drawn(transform, transform.draw(rng, *size), size))
        size = (transform.size, transform.size) if operation.crops else size
    return Trace(steps, size)


def _differ(sizes: np.ndarray) -> bool:
    """Return whether sizes (B, 2) differ."""
    return bool((sizes != sizes[0]).any())


def _listed(sizes: np.ndarray) -> str:
    """Return up to three of the sizes as text, for a message."""
    return ", ".join(sorted({f"{width}x{height}" for height, width in sizes.tolist()})[:3])
