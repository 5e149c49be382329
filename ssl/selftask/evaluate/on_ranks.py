"""Features extracted by several ranks, in the order of the data set.

Rank r of W has every W-th batch, from number r on. After each round of batches, rank 0 collects
the features, so it holds no more than W batches that are not yet written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from selftask.data.loading.loader import EvalBatches
from selftask.distributed import process_group
from selftask.distributed.collectives import broadcast_module, gather_objects
from selftask.distributed.world import World
from selftask.errors import RunError, UserError
from selftask.evaluate.features import Features, iterate_features


@dataclass(frozen=True)
class _Sent:
    """Message of a rank after each batch."""

    part: Features | None = None  # None: no image of the batch can be read
    is_end: bool = False
    error: str = ""
    is_mistake: bool = False  # the user must fix the error


@contextmanager
def connected(world: World) -> Iterator[None]:
    """Context with a process group of the ranks; features are sent through the CPU."""
    process_group.join_world(world, torch.device("cpu"))
    try:
        yield
    finally:
        process_group.leave_world()


def take_share(batches: EvalBatches, world: World) -> EvalBatches:
    """Restrict ``batches`` to those of this rank, in place, and return it."""
    if world.size > 1:
        batches.batches = batches.batches[world.rank :: world.size]
    return batches


def iterate_in_order(
    backbone: nn.Module, batches: EvalBatches, world: World, *, device: torch.device
) -> Iterator[Features]:
    """Yield the features of all ranks' batches on rank 0, in order; nothing on the others.

    Every rank must exhaust the iterator. All use the weights of rank 0. An error on any rank is
    raised on all of them.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        batches: This rank's batches, from ``take_share``.
        world: This process.
        device: Device of the backbone.

    Raises:
        UserError: As in ``extract_features``.
        RunError: If another rank has failed or ended.
    """
    parts = iterate_features(backbone, batches, device=device)
    if world.size == 1:
        yield from parts
        return
    broadcast_module(backbone)  # random weights (weights=none) differ between processes
    sending = _send(parts, batches.batches)
    while True:
        items = _gather(next(sending))
        for rank, item in enumerate(items):
            if item.error:
                kind = UserError if item.is_mistake else RunError
                raise kind(f"rank {rank} of {world.size}: {item.error}")
        if all(item.is_end for item in items):
            return
        if world.rank == 0:
            yield from (item.part for item in items if item.part is not None)


def _send(parts: Iterable[Features], batches: Sequence[Sequence[int]]) -> Iterator[_Sent]:
    """Yield one item per batch, then end markers forever; an error replaces the remaining items."""
    waiting = iter(parts)
    try:
        part = next(waiting, None)
        for batch in batches:
            if part is None or int(part.indices[0]) not in batch:  # no image of it can be read
                yield _Sent()
                continue
            part.check_finite()
            yield _Sent(part)
            part = next(waiting, None)
    except Exception as error:  # noqa: BLE001 - raised by the caller, on every rank
        is_explained = isinstance(error, UserError | RunError)
        text = str(error) if is_explained else f"{type(error).__name__}: {error}"
        yield _Sent(error=text, is_mistake=isinstance(error, UserError))
    while True:
        yield _Sent(is_end=True)


def _gather(item: _Sent) -> list[Any]:
    try:
        return gather_objects(item)
    except (dist.DistError, RuntimeError) as error:  # gloo raises a plain RuntimeError
        raise RunError(f"another rank has ended: {str(error).splitlines()[0]}") from error
