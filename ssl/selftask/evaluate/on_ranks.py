"""Batches of an evaluation, shared by several ranks, with results in the order of the data set.

Rank r of W processes every W-th batch, starting with batch r. After each round of W batches, every
rank collects the results, so a rank that writes them to a file holds the results of at most W
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.data.loading.loader import EvalBatches
from selftask.distributed import process_group
from selftask.distributed.collectives import broadcast_module, gather_objects, rank, world_size
from selftask.distributed.world import World
from selftask.errors import RunError, UserError, message_of
from selftask.evaluate.features import Features, iterate_features, log_speed

T = TypeVar("T")


@dataclass(frozen=True)
class _Sent:
    """Message of a rank after each batch."""

    result: Any = None  # None: no image of the batch can be read
    is_end: bool = False
    error: str = ""
    is_mistake: bool = False  # the user must fix the error


@contextmanager
def connected(world: World, backbone: nn.Module) -> Iterator[None]:
    """Context with a gloo process group of the ranks and the same backbone on all ranks.

    Args:
        world: This process.
        backbone: The backbone; its tensors are replaced by those of rank 0.
    """
    process_group.join_world(world, torch.device("cpu"))
    try:
        broadcast_module(backbone)  # random weights (weights=none) differ between processes
        yield
    finally:
        process_group.leave_world()


def in_order(compute: Callable[[Batch], T], batches: EvalBatches) -> Iterator[T]:
    """Yield the results of all batches on every rank, in order. The ranks share the batches.

    Every rank must exhaust the iterator. An error on any rank is raised on all of them.

    Args:
        compute: Batch -> result; with several ranks, its tensors must be on the CPU. It must not
            communicate between ranks.
        batches: All batches; changed in place to this rank's share of them.

    Raises:
        UserError: If no image or too few images can be read.
        RunError: If another rank has failed or ended.
    """
    _take_share(batches)
    results = ((batch.index, compute(batch)) for batch in log_speed(batches))
    is_empty = True
    for result in _of_all_ranks(results, batches):
        is_empty = False
        yield result
    if is_empty:
        raise UserError(f"{batches.bad_files.key}: no image can be read")


def iterate_in_order(
    backbone: nn.Module, batches: EvalBatches, *, device: torch.device
) -> Iterator[Features]:
    """Yield the features of all batches on every rank, in order. The ranks share the batches.

    Every rank must exhaust the iterator. An error on any rank is raised on all of them.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        batches: All batches; changed in place to this rank's share of them.
        device: Device of the backbone.

    Raises:
        UserError: If features are not finite, too many images are unreadable, or the backbone does
            not accept the size of the images.
        RunError: If another rank has failed or ended.
    """
    _take_share(batches)
    parts = iterate_features(backbone, batches, device=device)
    yield from _of_all_ranks(((part.indices, _finite(part)) for part in parts), batches)


def part_of_rank(features: Features) -> Features:
    """Return this rank's consecutive part of the features, for ``takes_parts = True``."""
    return features[torch.arange(len(features)).tensor_split(world_size())[rank()]]


def _take_share(batches: EvalBatches) -> None:
    batches.batches = batches.batches[rank() :: world_size()]


def _finite(part: Features) -> Features:
    part.check_finite()
    return part


def _of_all_ranks(results: Iterator[tuple[Tensor, T]], batches: EvalBatches) -> Iterator[T]:
    """Yield the results of all ranks in order, then count their unreadable images.

    Args:
        results: Indices of the images of each of this rank's batches, and its result.
        batches: This rank's batches.

    Raises:
        UserError: On every rank, if one of several ranks raised a UserError.
        RunError: On every rank, if one of several ranks raised another error.
    """
    if world_size() == 1:
        yield from (result for _, result in results)
        return
    sending = _send(results, batches.batches)
    items = _gather(next(sending))
    while not all(item.is_end for item in items):
        for number, item in enumerate(items):
            if item.error:
                kind = UserError if item.is_mistake else RunError
                raise kind(f"rank {number} of {world_size()}: {item.error}")
        yield from (item.result for item in items if item.result is not None)
        items = _gather(next(sending))
    for counted in gather_objects(batches.bad_files.counted):
        batches.bad_files.merge(counted)


def _send(
    results: Iterable[tuple[Tensor, Any]], batches: Sequence[Sequence[int]]
) -> Iterator[_Sent]:
    """Yield one item per batch, then end markers forever; an error replaces the remaining items."""
    waiting = iter(results)
    try:
        first = next(waiting, None)
        for batch in batches:
            if first is None or int(first[0][0]) not in batch:  # no image of it can be read
                yield _Sent()
                continue
            yield _Sent(first[1])
            first = next(waiting, None)
    except Exception as error:  # noqa: BLE001 - raised by the caller, on every rank
        yield _Sent(error=message_of(error), is_mistake=isinstance(error, UserError))
    while True:
        yield _Sent(is_end=True)


def _gather(item: _Sent) -> list[Any]:
    try:
        return gather_objects(item)
    except (dist.DistError, RuntimeError) as error:  # gloo raises a plain RuntimeError
        raise RunError(f"another rank has ended: {str(error).splitlines()[0]}") from error
