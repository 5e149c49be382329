"""Make samples one step ahead, on a side stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from selftask.errors import UserError

Sample = dict[str, Any]


class Ahead:
    """Returns the samples of ``make()`` in order, each made one call earlier.

    On CUDA, ``make`` launches its copies and kernels on a side stream, so that they run during the
    step before. A UserError of ``make`` is raised when its own sample is asked for, after the
    steps before it.
    """

    def __init__(self, make: Callable[[], Sample], device: torch.device) -> None:
        self._make = make
        self._device = device
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._made: tuple[Sample | UserError, torch.cuda.Event | None] | None = None

    def next(self) -> Sample:
        """Return the next sample, ready for the current stream; raises its UserError."""
        made = self._one() if self._made is None else self._made
        sample, done = made
        if isinstance(sample, UserError):
            self._made = made  # asking again raises it again
            raise sample
        if done is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(done)
            for tensor in _tensors(sample):  # their memory must not be reused before `now` is done
                tensor.record_stream(now)
        self._made = self._one()
        return sample

    def _one(self) -> tuple[Sample | UserError, torch.cuda.Event | None]:
        try:
            with self._on_stream():
                sample = self._make()
                done = None if self._stream is None else self._stream.record_event()
        except UserError as error:
            return error, None
        return sample, done

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


def _tensors(sample: Sample) -> Iterator[Tensor]:
    for value in sample.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Tensor) and one.is_cuda:
                yield one
