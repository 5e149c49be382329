"""Mean run time of a function or block, for code of one's own."""

from __future__ import annotations

import time
from contextlib import ContextDecorator
from typing import Any

import torch

from selftask.distributed.accelerator import wait_for


class TimeCounter(ContextDecorator):
    """Measures the mean run time of a function (as a decorator) or a block (as a context).

    Args:
        skip: Number of first calls that do not count, in which kernels are chosen or compiled.
        device: Device to wait for before and after each call. None measures the host alone.

    Attributes:
        count: Number of measured calls.
        total_s: Their run time in seconds.
    """

    def __init__(self, *, skip: int = 1, device: torch.device | None = None) -> None:
        self.skip, self.device = skip, device
        self.count, self.total_s = 0, 0.0
        self._begun: list[float] = []  # of calls in progress, which may be nested

    @property
    def mean_s(self) -> float:
        """Mean run time of a call in seconds; nan before the first measured call."""
        return self.total_s / self.count if self.count else float("nan")

    def __enter__(self) -> TimeCounter:
        self._begun.append(self._now())
        return self

    def __exit__(self, *_: Any) -> None:
        seconds = self._now() - self._begun.pop()
        if self.skip:
            self.skip -= 1
            return
        self.count, self.total_s = self.count + 1, self.total_s + seconds

    def _now(self) -> float:
        if self.device is not None:
            wait_for(self.device)
        return time.perf_counter()
