"""Prefetching: samples are made one step ahead, on a side stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from selftask.distributed import accelerator
from selftask.errors import UserError

Sample = dict[str, Any]


class Ahead:
    """Returns the samples of ``make()`` in order; each is made one call earlier.

    On an accelerator with streams, the copies and kernels of ``make`` run on a side stream, during
    the previous step. A UserError of ``make`` is raised when its own sample is requested, after the
    previous steps.
    """

    def __init__(self, make: Callable[[], Sample], device: torch.device) -> None:
        self._make = make
        self._device = device
        self._stream = accelerator.side_stream(device)
        self._made: tuple[Sample | UserError, Any] | None = None

    def next(self) -> Sample:
        """Return the next sample, ready for use on the current stream; may raise its UserError."""
        made = self._one() if self._made is None else self._made
        sample, done = made
        if isinstance(sample, UserError):
            self._made = made  # the next call raises it again
            raise sample
        if done is not None:
            now = accelerator.current_stream(self._device)
            now.wait_event(done)
            for tensor in _tensors(sample):  # keep their memory until the current stream is done
                tensor.record_stream(now)
        self._made = self._one()
        return sample

    def _one(self) -> tuple[Sample | UserError, Any]:
        try:
            with accelerator.on_stream(self._stream, self._device):
                sample = self._make()
                done = None if self._stream is None else accelerator.record_event(self._device)
        except UserError as error:
            return error, None
        return sample, done


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors on an accelerator, at any depth of dicts and lists."""
    if isinstance(value, Tensor):
        if accelerator.is_accelerator(value.device):
            yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
