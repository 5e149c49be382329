"""A task with batches from the user: a DataLoader, a list, or any iterable with a length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.source import Source
from selftask.distributed.collectives import rank, world_size
from selftask.distributed.world import read_world
from selftask.errors import UserError
from selftask.task import Task


def describe(batches: Any) -> dict[str, Any]:
    """Return settings derived from the first batch: batch size and number of views.

    Raises UserError if the batches have no length or are empty.
    """
    if not hasattr(batches, "__len__") or len(batches) == 0:
        raise UserError("batches: expected an iterable with a length, the batches of an epoch")
    first = as_batch(next(iter(batches)), 0, 1)
    groups = {
        name: {"count": len(views), "transforms": ["normalize"]}
        for name, views in first.views.items()
    }
    unused = {} if "main" in groups else {"views.main": None}
    size = len(first.index) * read_world().size
    return {"train.batch_size": size, "views": groups, **unused}


def as_batch(item: Any, number: int, batches_per_epoch: int) -> Batch:
    """Return a ``Batch`` of this rank, made from a tensor, views or (views, labels).

    If the last element is a vector of integers, it is taken as the labels.

    Args:
        item: Item of the user's iterable: a view (B, C, H, W), or views and perhaps labels (B,).
        number: Index of the batch, counted from the start of training.
        batches_per_epoch: Number of batches per epoch.
    """
    epoch, place = divmod(number, batches_per_epoch)
    if isinstance(item, Batch):
        item.number, item.epoch = number, epoch
        return item
    labels = None
    if isinstance(item, list | tuple) and len(item) > 1 and _are_labels(item[-1]):
        *item, labels = item
        item = item[0] if len(item) == 1 else item
    groups = item if isinstance(item, Mapping) else {"main": item}
    views = {name: [v] if isinstance(v, Tensor) else list(v) for name, v in groups.items()}
    every = [view for group in views.values() for view in group]
    if not every or not all(
        isinstance(view, Tensor) and view.is_floating_point() for view in every
    ):
        raise UserError(
            f"batches: a {type(item).__name__} is no batch; give float views (B, C, H, W), a list "
            "of them, (views, labels), or a selftask.batch.Batch"
        )
    size, device = len(every[0]), every[0].device
    start = (place * world_size() + rank()) * size
    index = torch.arange(start, start + size)
    return Batch(
        views=views,
        labels=torch.full((size,), NO_LABEL, device=device) if labels is None else labels,
        index=index.to(device, non_blocking=True),
        key=torch.stack([torch.full_like(index, epoch), index], dim=1),
        number=number,
        epoch=epoch,
    )


def _are_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and not value.is_floating_point()


class TaskOfBatches(Task):
    """A task that reads the user's batches, epoch by epoch.

    With several ranks, the batches of each rank are its part of the global batches.
    """

    def __init__(self, config: Config, batches: Any, backbone: nn.Module | None = None) -> None:
        self.given = batches
        count = _Count(len(batches) * config.train.batch_size, _channels(batches))
        super().__init__(config, sources=Sources(count, None), backbone=backbone)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        super().prepare(*args, **kwargs)
        self.data_module.train_batches = self._train_batches  # type: ignore[method-assign]

    def _train_batches(self, first: int) -> Iterator[Batch]:
        number, per_epoch = first, self.length.batches_per_epoch
        while True:
            for item in islice(self.given, number % per_epoch, None):
                yield _moved(as_batch(item, number, per_epoch), self.device)
                number += 1


def _channels(batches: Any) -> int:
    """Return the number of channels of the first view."""
    return int(as_batch(next(iter(batches)), 0, 1).all_views[0].shape[1])


def _moved(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to the device of the task."""
    if device.type != "cpu":
        batch.views = {
            k: [v.to(device, non_blocking=True) for v in group] for k, group in batch.views.items()
        }
        for name in ("labels", "index"):
            setattr(batch, name, getattr(batch, name).to(device, non_blocking=True))
    return batch


class _Count(Source):
    """A source with the number of images of an epoch of batches; images cannot be read."""

    def __init__(self, count: int, channels: int) -> None:
        self.count, self.channels = count, channels

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise UserError("this task was created from batches: it has no images to evaluate on")

    def path(self, index: int) -> str:
        return f"sample {index} of the batches"

    def describe(self) -> str:
        return f"{self.count} samples in given batches"
