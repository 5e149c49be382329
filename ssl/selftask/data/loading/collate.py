"""Batches as workers return them, and the collation of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from selftask.batch import Batch, Extras
from selftask.data.loading.sample import Sample
from selftask.errors import BadImage, UserError

if TYPE_CHECKING:
    from typing_extensions import Self

    from selftask.data.loading.dataset import Dataset


Draw: TypeAlias = Callable[[torch.Tensor, list[tuple[int, int]]], dict[str, Any]]
"""Function of keys, int64 (B, 2), and of height and width of each view.

It returns ``Batch.drawn`` on the CPU.
"""


class Allocator(Protocol):
    """``numpy.empty``, or an allocator of arrays in memory shared with the main process."""

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class RawBatch:
    """Batch of B samples as workers return it; skipped samples are not among them."""

    views: list[torch.Tensor]  # V uint8 (B, H, W, C)
    labels: torch.Tensor  # (B,) int64
    index: torch.Tensor  # (B,) int64, of the images shown
    key: torch.Tensor  # (B, 2) int64, keys that the draws depend on
    epoch: int
    bad: list[BadImage]
    num_left_out: int
    problem: str = ""  # error that the user must fix; such a batch has no views
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # (B, ...) by name
    drawn: dict[str, Any] = field(default_factory=dict)  # nested tensors, see ``Batch.drawn``
    made_s: float = 0.0  # time that a worker took, in seconds

    @property
    def view_sizes(self) -> list[tuple[int, int]]:
        """Height and width of each view."""
        return [(view.shape[1], view.shape[2]) for view in self.views]

    def with_draws(self, draw: Draw | None, new: Allocator) -> Self:
        """Return the batch with ``drawn`` set by ``draw``; unchanged without ``draw`` or views.

        ``new`` allocates the arrays.
        """
        if draw is None or not self.views:
            return self

        def stored(tensor: torch.Tensor) -> torch.Tensor:
            array = new(tuple(tensor.shape), tensor.numpy().dtype)
            return torch.from_numpy(array).copy_(tensor)

        drawn = draw(self.key, self.view_sizes)
        return replace(self, drawn=tree_map_only(torch.Tensor, stored, drawn))

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory, except its key, which stays on the host.

        Called by DataLoader's pinning thread.
        """
        return replace(
            self,
            views=[view.pin_memory() for view in self.views],
            labels=self.labels.pin_memory(),
            index=self.index.pin_memory(),
            extras={name: values.pin_memory() for name, values in self.extras.items()},
            drawn=tree_map_only(torch.Tensor, torch.Tensor.pin_memory, self.drawn),
        )

    def finish(self, dataset: Dataset, device: torch.device) -> Batch:
        """Return the batch on the device, with float views by group.

        The key stays on the host, where draws are looked up.

        Args:
            dataset: Dataset of the samples, which defines how views are converted to float.
            device: Device of the result.
        """

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        views = iter(self.make_views(dataset, device))
        extras = {name: moved(values) for name, values in self.extras.items()}
        recorder = dataset.recorder
        return Batch(
            views={name: list(islice(views, count)) for name, count in dataset.groups.items()},
            labels=moved(self.labels),
            index=moved(self.index),
            key=self.key,
            draws={} if recorder is None else recorder.unpack(extras.pop(recorder.name)),
            extras=Extras(extras),
            drawn=tree_map_only(torch.Tensor, moved, self.drawn),
            epoch=self.epoch,
        )

    def make_views(self, dataset: Dataset, device: torch.device) -> list[torch.Tensor]:
        """Return V normalized float32 views (B, C, H, W) on the device."""
        pixels = [view.to(device, non_blocking=True) for view in self.views]
        return [convert(view) for convert, view in zip(dataset.to_float, pixels, strict=True)]


def broken(problem: str) -> RawBatch:
    """Return an empty batch with an error that the user must fix."""
    none = torch.empty(0, dtype=torch.int64)
    return RawBatch([], none, none, none.view(0, 2), 0, [], 0, problem)


@dataclass
class BatchFields:
    """Fields of a RawBatch except its views, collected sample by sample."""

    labels: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    key: list[tuple[int, int]] = field(default_factory=list)
    epoch: int = 0
    bad: list[BadImage] = field(default_factory=list)
    num_left_out: int = 0
    extras: list[dict[str, np.ndarray]] = field(default_factory=list)  # of each sample

    def add(self, sample: Sample) -> bool:
        """Add a sample; return True if it has views."""
        self.epoch = sample.epoch
        self.bad += sample.bad
        if not sample.views:
            self.num_left_out += 1
            return False
        self.labels.append(sample.label)
        self.index.append(sample.index)
        self.key.append(sample.key)
        if sample.extras:
            self.extras.append(sample.extras)
        return True

    def of_batch(self, new: Allocator) -> dict[str, Any]:
        """Return the fields of a RawBatch except its views.

        Args:
            new: Allocator of the extras' arrays.

        Raises:
            UserError: If an extra field differs in shape or dtype between samples.
        """
        return {
            "epoch": self.epoch,
            "bad": self.bad,
            "num_left_out": self.num_left_out,
            "extras": {name: self._stack(name, new) for name in (self.extras or [{}])[0]},
            "labels": torch.tensor(self.labels, dtype=torch.int64),
            "index": torch.tensor(self.index, dtype=torch.int64),
            "key": torch.tensor(self.key, dtype=torch.int64).view(-1, 2),
        }

    def _stack(self, name: str, new: Allocator) -> torch.Tensor:
        arrays = [extras[name] for extras in self.extras]
        kinds = sorted({f"{array.dtype} {array.shape}" for array in arrays})
        if len(kinds) > 1:
            raise UserError(
                f"data: its {name!r} differs between samples ({', '.join(kinds[:3])}) and "
                "makes no batch"
            )
        stacked = new((len(arrays), *arrays[0].shape), arrays[0].dtype)
        return torch.from_numpy(np.stack(arrays, out=stacked))


def collate(samples: Iterable[Sample], buffer: BatchBuffer, keys: Sequence[str]) -> RawBatch:
    """Collate samples; each is copied as soon as it is read, so that its views are not kept.

    If views cannot be stacked, the batch has ``problem`` and no views. UserError is raised if an
    extra field cannot be stacked. ``keys`` are the config keys of the transforms of each view.
    """
    fields = BatchFields()
    for sample in samples:
        if fields.add(sample):
            buffer.add(sample.views)
    problem = buffer.problem(keys)
    filled = [] if problem else [view[: buffer.count] for view in buffer.views]
    views = [torch.from_numpy(view) for view in filled]
    return RawBatch(views=views, **fields.of_batch(buffer.new), problem=problem)


class BatchBuffer:
    """Arrays for the views of a batch, and a check that the views can be stacked.

    Args:
        size: Largest number of samples.
        new: Allocator of the arrays.
    """

    def __init__(self, size: int, new: Allocator = np.empty) -> None:
        self.views: list[np.ndarray] = []  # V uint8 (size, ...), shaped like the first views
        self.next: list[np.ndarray] = []  # V uint8, for the next views; empty before the first
        self.count = 0
        self.new = new
        self._size = size
        self._odd: dict[int, np.ndarray] = {}  # view -> the first image that is not 8-bit
        self._others: dict[int, set[tuple[int, ...]]] = {}  # view -> its shapes, if they differ

    def add(self, views: list[np.ndarray]) -> None:
        """Copy a sample's views (H, W, C) into ``next``, except those already written there.

        A view that is not uint8, or of another shape than the first sample's, is not copied but
        reported by ``problem``.
        """
        if not self.views:
            self.views = [self.new((self._size, *view.shape), np.uint8) for view in views]
            self.next = [view[0] for view in self.views]
        for number, (row, view) in enumerate(zip(self.next, views, strict=True)):
            if view.dtype != np.uint8 or view.ndim != 3:
                self._odd.setdefault(number, view)
            elif view.shape != row.shape:
                self._others.setdefault(number, {row.shape}).add(view.shape)
            elif view is not row:
                row[:] = view
        self.count += 1
        self.next = [view[self.count] for view in self.views] if self.count < self._size else []

    def problem(self, keys: Sequence[str]) -> str:
        """Return an error message if the images of a view cannot be stacked, or an empty string.

        ``keys`` are the config keys of the transforms of each view.
        """
        for number, odd in self._odd.items():
            return (
                f"{keys[number]}: the result is {odd.dtype} of shape {odd.shape}; "
                "8-bit images (H, W, C) are expected (normalize, the last one, makes floats)"
            )
        for number, shapes in self._others.items():
            height_width = sorted({f"{shape[1]}x{shape[0]}" for shape in shapes})
            if len(height_width) == 1:
                channels = " and ".join(str(count) for count in sorted({s[2] for s in shapes}))
                return f"{keys[number]}: images of {channels} channels make no batch"
            return (
                f"{keys[number]}: images of different sizes ({', '.join(height_width[:3])}) make "
                "no batch; add a crop (random_resized_crop or center_crop)"
            )
        return ""
