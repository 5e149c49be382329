"""Simulated ranks: a process acts as one of many ranks, without a process group.

Collectives return tensors of the right shape, and their traffic is counted. Values are wrong, so
this is for fake tensors, which have no values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class SimulatedRanks:
    """Number of simulated ranks, and the bytes that one of them has sent.

    There is one object per process, ``SIMULATED``.

    Attributes:
        size: Number of ranks, W; 1 if nothing is simulated.
        bytes_of: Collective -> bytes sent by one rank.
    """

    def __init__(self) -> None:
        self.size = 1
        self.bytes_of: Counter[str] = Counter()

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Context in which this process is the first of ``size`` ranks."""
        before = self.size, self.bytes_of
        self.size, self.bytes_of = size, Counter()
        try:
            yield
        finally:
            self.size, self.bytes_of = before

    @property
    def active(self) -> bool:
        """True if there is more than one simulated rank."""
        return self.size > 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Count a ring all-reduce: each rank sends 2 (W - 1) / W of the tensor. Return ``x``."""
        self.bytes_of["all_reduce"] += 2 * (self.size - 1) * x.nbytes // self.size
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Count a ring all-gather: each rank sends W - 1 parts. Return shape (W * len(x), ...)."""
        self.bytes_of["all_gather"] += (self.size - 1) * x.nbytes
        parts = x.new_empty(self.size, *x.shape)
        return parts.flatten(0, 1).clone()  # like ``torch.cat`` of the received parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Count a ring reduce-scatter, (W - 1) / W of the tensor; return the part of this rank."""
        self.bytes_of["reduce_scatter"] += (self.size - 1) * x.nbytes // self.size
        return x[: len(x) // self.size].clone()

    def all_to_all(self, x: Tensor) -> Tensor:
        """Count an exchange of rows: each rank sends (W - 1) / W of them. Return a copy."""
        self.bytes_of["all_to_all"] += (self.size - 1) * x.nbytes // self.size
        return x.clone()


SIMULATED = SimulatedRanks()
