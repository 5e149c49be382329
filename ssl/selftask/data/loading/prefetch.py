"""Prefetching: batches are made one step ahead, on a side stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from selftask.batch import Batch
from selftask.distributed import accelerator
from selftask.errors import UserError


class Prefetcher:
    """Buffer for the batches of ``make()``: each call returns a batch and makes the next one.

    On an accelerator with streams, the copies and kernels of ``make`` run on a side stream, during
    the previous step. A UserError of ``make`` is raised when the failed batch is requested, after
    the previous steps. Other errors are raised at once.
    """

    def __init__(self, make: Callable[[], Batch], device: torch.device) -> None:
        self._make = make
        self._device = device
        self._stream = accelerator.side_stream(device)
        self._made: tuple[Batch | UserError, Any] | None = None

    def next(self) -> Batch:
        """Return the next batch, ready for use on the current stream.

        Raises:
            UserError: As raised by ``make`` for this batch; further calls raise it again.
        """
        made = self._make_one() if self._made is None else self._made
        batch, done = made
        if isinstance(batch, UserError):
            self._made = made  # the next call raises it again
            raise batch
        if done is not None:
            now = accelerator.current_stream(self._device)
            now.wait_event(done)
            for tensor in _tensors(batch):  # keep their memory until the current stream is done
                tensor.record_stream(now)
        self._made = self._make_one()
        return batch

    def close(self) -> None:
        """Drop the prefetched batch, after the side stream has finished reading its images."""
        _, done = self._made or (None, None)
        if done is not None:
            accelerator.current_stream(self._device).wait_event(done)
        self._made = None

    def _make_one(self) -> tuple[Batch | UserError, Any]:
        try:
            with accelerator.on_stream(self._stream, self._device):
                batch = self._make()
                done = None if self._stream is None else accelerator.record_event(self._device)
        except UserError as error:
            return error, None
        return batch, done


def _tensors(batch: Batch) -> Iterator[Tensor]:
    draws = (draw.matrix for group in batch.draws.values() for draw in group)  # one memory for all
    drawn = (leaf for leaf in tree_leaves(batch.drawn) if isinstance(leaf, Tensor))
    tensors = (*batch.all_views, batch.labels, batch.index, *batch.extras.values(), *draws, *drawn)
    return (tensor for tensor in tensors if accelerator.is_accelerator(tensor.device))
