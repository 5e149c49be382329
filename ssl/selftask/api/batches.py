"""A task with batches from the user: a DataLoader, a list, or any iterable with a length."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from selftask.batch import Batch, Draws, Extras, with_dtype
from selftask.config.checks.requirements import count_problems
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.data.reading.class_numbers import NO_LABEL
from selftask.data.source import Source
from selftask.distributed.collectives import rank, world_size
from selftask.distributed.world import read_world
from selftask.errors import UserError
from selftask.logs import get_logger
from selftask.methods.base import Method
from selftask.methods.families.view_pixels import ViewPixels
from selftask.task import Task

log = get_logger(__name__)

_END = object()


def first_batch(batches: Any) -> Batch:
    """Return the first batch as a ``Batch``. The caller's random states stay the same.

    Raises:
        UserError: If the batches have no length or are empty, or as ``as_batch``.
    """
    if not _length(batches):
        raise UserError("batches: expected an iterable with a length, the batches of an epoch")
    with _Generators(seed=0).in_use():
        return as_batch(next(iter(batches)), 0, 1)


def _length(batches: Any) -> int:
    """Return the number of batches, 0 if it is unknown."""
    try:
        return len(batches)
    except TypeError:  # also a DataLoader of an IterableDataset without a length
        return 0


def settings_of(first: Batch) -> dict[str, Any]:
    """Return the config settings that follow from the first batch, by dotted key.

    ``train.batch_size`` is the number of samples over all ranks. ``views.NAME`` has the number of
    views of a group; its transforms are placeholders, since the user's views are already augmented.
    ``views.main`` is None if the batch has no group of this name, which removes the default group.

    Args:
        first: First batch of this rank. All ranks must have batches of the same size.
    """
    groups = {
        f"views.{name}": {"count": len(views), "transforms": ["normalize"]}
        for name, views in first.views.items()
    }
    size = len(first.index) * read_world().size
    return {"train.batch_size": size, "views.main": None, **groups}


def as_batch(item: Any, number: int, batches_per_epoch: int, full_size: int = 0) -> Batch:
    """Return a ``Batch`` of this rank, made from a tensor, views or (views, labels).

    If the last element of a list or tuple is a vector (B,) of integers or bools, it is taken as the
    labels. A ``Batch`` is copied, with the same tensors, so that the user's object keeps no results
    of a step. Other items get the indices that follow those of the previous batches of the epoch,
    if all ranks have batches of the same size.

    Args:
        item: Item of the user's iterable: a ``Batch``; a view (B, C, H, W), a list of views or a
            dict of view groups; or a tuple of these and labels (B,).
        number: Index of the batch, counted from the start of training.
        batches_per_epoch: Number of batches per epoch.
        full_size: Number of samples of all batches of this rank but the last of an epoch, which may
            be smaller. 0 means that of this batch.

    Raises:
        UserError: If the item is none of these, or its views are not floating-point tensors
            (B, C, H, W).
    """
    epoch, position = divmod(number, batches_per_epoch)
    if isinstance(item, Batch):
        results = ("drawn", "added", "added_terms")  # results of a step
        copies: dict[str, Any] = {name: dict(getattr(item, name)) for name in results}
        return replace(item, number=number, epoch=epoch, **copies)
    original, labels = item, None
    if isinstance(item, list | tuple) and len(item) > 1 and _are_labels(item[-1]):
        *item, labels = item
        item = item[0] if len(item) == 1 else item
    groups = item if isinstance(item, Mapping) else {"main": item}
    views = {
        name: [v] if isinstance(v, Tensor) or not isinstance(v, Iterable) else list(v)
        for name, v in groups.items()
    }
    every = [view for group in views.values() for view in group]
    if not every or not all(map(_is_view, every)):
        raise UserError(
            f"batches: a {type(original).__name__} is no batch (number {number}); give float views "
            "(B, C, H, W), a list of them, (views, labels), or a selftask.batch.Batch; this is "
            + _described(original)
        )
    size, device = len(every[0]), every[0].device
    start = (position * world_size() + rank()) * (full_size or size)
    index = torch.arange(start, start + size)
    return Batch(
        views=views,
        labels=torch.full((size,), NO_LABEL, device=device)
        if labels is None
        else per_image(labels, "labels", size, device),
        index=index.to(device, non_blocking=True),
        key=torch.stack([torch.full_like(index, epoch), index], dim=1),
        number=number,
        epoch=epoch,
    )


def per_image(values: Any, name: str, size: int, device: torch.device) -> Tensor:
    """Return integers, one for each image of a batch, as int64 (B,) on a device.

    Args:
        values: A tensor or array of integers or bools, or a list of them.
        name: Name of the values in messages.
        size: Number of images, B.
        device: The device.

    Raises:
        UserError: If these are other values, or another number of them.
    """
    numbers = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    if numbers.is_floating_point() or numbers.shape != (size,):
        raise UserError(
            f"{name}: expected an integer for each of the {size} images of the batch; this is "
            f"{_described(numbers)}"
        )
    return numbers.to(device, torch.int64, non_blocking=True)


def check_batch(method: Method, batch: Batch, *, has_index: bool) -> None:
    """Raise UserError if a user's batch lacks views, labels, indices or crop boxes of the method.

    Labels are looked at in the first batch only, since the host has to wait for them.

    Args:
        method: The method.
        batch: Result of ``as_batch``.
        has_index: Whether its indices are those of the images in the user's data set, and not
            counted.
    """
    name = type(method).__name__
    numbers = {group: len(views) for group, views in batch.views.items()}
    for _, text in count_problems(name, method.views, numbers):
        raise UserError(text)
    if "labels" in method.requires and batch.number == 0 and (batch.labels == NO_LABEL).any():
        raise UserError(f"batches: {name} needs a label for each image; give (views, labels)")
    if "index" in method.requires and not has_index:
        raise UserError(
            f"batches: {name} has a memory of the images and needs the index of each image in the "
            "data set; give a selftask.batch.Batch, or index= to a Learner"
        )
    if "boxes" in method.requires and not batch.draws:
        raise UserError(
            f"batches: {name} needs the crop boxes of the views; give a selftask.batch.Batch with "
            "draws"
        )


def _described(item: Any) -> str:
    """Return an item of the user's iterable in words: ``list of [uint8 (8, 3, 32, 32), str]``."""
    if isinstance(item, Tensor):
        return f"{str(item.dtype).removeprefix('torch.')} {(*item.shape,)}"
    kind = type(item).__name__
    if isinstance(item, list | tuple):
        parts = [_described(part) for part in item[:4]] + ["..."] * bool(item[4:])
        return f"{kind} of [{', '.join(parts)}]"
    return kind


def _is_view(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()


def _are_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and not value.is_floating_point()


class TaskOfBatches(Task):
    """A task that reads the user's batches, epoch by epoch.

    With several ranks, each rank passes its own part of the global batches.

    Args:
        config: The config of the run; ``config.train.batch_size`` is that of all ranks.
        batches: Batches of an epoch, as for ``create_task``.
        channels: Number of channels of the views.
        backbone: The module to train; None builds the one of ``config.backbone``.
        has_transforms: Whether ``config.views`` has the user's transforms, not placeholders.
    """

    def __init__(
        self,
        config: Config,
        batches: Any,
        channels: int,
        backbone: nn.Module | None = None,
        *,
        has_transforms: bool = False,
    ) -> None:
        self.user_batches, self.has_transforms = batches, has_transforms
        source = _Count(len(batches) * config.train.batch_size, channels)
        super().__init__(config, sources=Sources(source, None), backbone=backbone)

    def build_model(self) -> None:
        super().build_model()
        undoes_normalization = isinstance(self.loss, ViewPixels) and hasattr(self.loss, "mean")
        if undoes_normalization and not self.has_transforms:
            raise UserError(
                f"batches: {self.config.method.name} undoes the normalization of the views; give "
                "theirs as **{'views.main.transforms': [{'name': 'normalize', 'mean': [...], "
                "'std': [...]}]}"
            )

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        super().prepare(*args, **kwargs)
        self.data_module.train_batches = self._train_batches  # type: ignore[method-assign]

    def _train_batches(self, first: int) -> Iterator[Batch]:
        number, per_epoch = first, self.length.batches_per_epoch
        dtype = next((p.dtype for p in self.base_model.parameters()), torch.float32)
        full_size = self.config.train.batch_size // world_size()
        while True:
            epoch, start = divmod(number, per_epoch)
            for item in read_epoch(self.user_batches, epoch, start, self.config.train.seed):
                batch = as_batch(item, number, per_epoch, full_size)
                check_batch(self.loss, batch, has_index=isinstance(item, Batch))
                yield _moved(with_dtype(batch, dtype), self.device)
                number += 1
            if number < (epoch + 1) * per_epoch:
                raise UserError(
                    f"batches: epoch {epoch} ended after {number % per_epoch} batches, and their "
                    f"length is {per_epoch}"
                )


def read_epoch(batches: Any, epoch: int, start: int, seed: int) -> Iterator[Any]:
    """Yield the user's batches of an epoch from number ``start`` on.

    ``set_epoch(epoch)`` of the object, its ``batch_sampler`` and ``sampler`` is called first, if it
    exists. If the object or its ``batch_sampler`` has ``seek(start)``, the batches before
    ``start`` are skipped; otherwise they are read again. While batches are read, the global
    generators of Python, NumPy and torch have states that follow from seed, epoch and rank, so that
    a DataLoader with ``shuffle=True`` repeats its order. In between they have those of the caller.

    Args:
        batches: The user's iterable.
        epoch: Number of the epoch, from 0.
        start: Number of the first batch to yield, from 0 in each epoch.
        seed: Seed of the run.
    """
    parts = [getattr(batches, name, None) for name in ("batch_sampler", "sampler")]
    for part in (batches, *parts):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    can_seek = next((part for part in (batches, parts[0]) if hasattr(part, "seek")), None)
    if can_seek is not None:
        can_seek.seek(start)
    elif start:
        log.info(
            "batches: the first %d of epoch %d are read again; a method seek(start) of the object "
            "or its batch_sampler avoids that",
            *(start, epoch),
        )
    generators = _Generators(seed + epoch * 1_000_003 + rank())
    with generators.in_use():
        iterator = iter(batches)
    try:
        for position in count(start if can_seek is not None else 0):
            with generators.in_use():
                item = next(iterator, _END)
            if item is _END:
                return
            if position >= start:
                yield item
    except BaseException:  # GeneratorExit too: the steps were abandoned
        _end_workers(batches, iterator)
        raise


def _end_workers(batches: Any, iterator: Any) -> None:
    """End the workers of a DataLoader that stops in the middle of an epoch.

    The garbage collector may close their queues before it ends them. Then torch waits for each
    worker for five seconds.
    """
    shut_down = getattr(iterator, "_shutdown_workers", None)  # none without workers
    if shut_down is not None:
        shut_down()
        if getattr(batches, "_iterator", None) is iterator:  # persistent workers
            batches._iterator = None  # the next epoch starts new ones


class _Generators:
    """States of the global random generators for reading batches, separate from training."""

    def __init__(self, seed: int) -> None:
        torch_generator = torch.Generator().manual_seed(seed)
        self.states: tuple[Any, ...] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
            torch_generator.get_state(),
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the global generators have these states, which are updated at exit."""
        before = self._swap(self.states)
        try:
            yield
        finally:
            self.states = self._swap(before)

    def _swap(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        return before


def _moved(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on a device, except its key, which stays on the CPU."""

    def moved(value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)

    if device.type == "cpu":
        return batch
    fields = {name: moved(getattr(batch, name)) for name in ("views", "labels", "index", "drawn")}
    draws = {
        name: [Draws(**moved(vars(draws))) for draws in group]
        for name, group in batch.draws.items()
    }
    return replace(batch, **fields, extras=Extras(moved(dict(batch.extras))), draws=draws)


class _Count(Source):
    """A source that has the number of images of an epoch, but whose images cannot be read."""

    is_readable = False

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
