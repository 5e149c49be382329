"""Batches from workers to the main process, in memory that both keep and use again.

torch's own way makes a file in shared memory for every tensor, which both processes have to map
page by page: about a third of a millisecond for 300 KB on a virtual machine. Here a worker writes a
batch into a *slot*, a stretch of one file without a name that both map once, and only says where.

The first byte of a slot is its mark. The worker sets it when it hands the batch over; it is
cleared in the main process when the last tensor over the slot is gone, whoever kept it and however
long, and then the worker writes there again. A worker never waits for a slot: if all are marked it
takes one more. So there are as many as batches were alive at once, each as large as its largest
batch; they lie in no file system (not in /dev/shm) and go with the last process that has them.
"""

from __future__ import annotations

import io
import itertools
import math
import mmap
import os
import pickle
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from selftask.data.loading.collate import Batch
from selftask.errors import UserError

_STRIDE = 1 << 36  # bytes from slot to slot in the file, which has no memory where nothing is
_START = 64  # bytes before the first array: the mark, and what puts arrays on cache lines
_MARK = 0


class SlotPool:
    """The slots of all workers of a loader; made before they are forked."""

    def __init__(self) -> None:
        self.name = next(_NAMES)
        self._file = _file_without_name()
        weakref.finalize(self, os.close, self._file)
        self._mapped: dict[int, mmap.mmap] = {}
        _MEMORIES[self.name] = self

    def map(self, slot: int, size: int) -> mmap.mmap:
        """The first ``size`` bytes, or more, of a slot in this process; raises UserError."""
        found = self._mapped.get(slot)
        if found is None or len(found) < size:
            try:
                found = self._mapped[slot] = self._map(slot, 1 << (size - 1).bit_length())
            except OSError as error:
                raise UserError(
                    f"data: no memory to share a batch of {size / 2**20:.0f} MiB: "
                    f"{error.strerror}; use fewer data.num_workers or smaller batches"
                ) from error
        return found

    def _map(self, slot: int, size: int) -> mmap.mmap:
        start, size = slot * _STRIDE, max(size, mmap.PAGESIZE)
        if os.fstat(self._file).st_size < start + size:  # ftruncate could undo what others added
            os.pwrite(self._file, b"\0", start + size - 1)
        return mmap.mmap(self._file, size, offset=start)

    def lent(self, slot: int, size: int) -> torch.Tensor:
        """The bytes of a slot, which is free again when no tensor that shares them is left."""
        mapping = self.map(slot, size)
        array: np.ndarray = np.ndarray((size,), np.uint8, buffer=mapping)
        weakref.finalize(array, _clear, mapping, os.getpid()).atexit = False
        return torch.from_numpy(array)


# By name, since the thread that pins batches knows nothing but the batch.
_MEMORIES: weakref.WeakValueDictionary[int, SlotPool] = weakref.WeakValueDictionary()
_NAMES = itertools.count()


def _clear(mapping: mmap.mmap, owner: int) -> None:
    if os.getpid() == owner:  # a process forked meanwhile has the tensor, too, and may drop it
        mapping[_MARK] = 0


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("selftask-batches")
    with tempfile.TemporaryFile() as file:  # not Linux
        return os.dup(file.fileno())


class SlotWriter:
    """A worker's side: the slots first, first + step, ... of a memory, one batch at a time."""

    def __init__(self, memory: SlotPool, first: int, step: int) -> None:
        self._memory = memory
        self._first, self._step = first, step
        self._slot: int | None = None  # of the batch, once it has an array
        self._used = _START
        self._starts: dict[int, int] = {}  # address of an array -> where it begins in the slot

    def new(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array in the slot, not filled: its batch is its owner."""
        if self._slot is None:
            self._slot = self._free()
        kind, start = np.dtype(dtype), self._used
        end = start + math.prod(shape) * kind.itemsize
        mapping = self._memory.map(self._slot, end)
        array: np.ndarray = np.ndarray(shape, kind, buffer=mapping, offset=start)
        self._starts[array.ctypes.data] = start
        self._used = -(-end // _START) * _START
        return array

    def send(self, batch: Batch) -> Batch | SlotRef:
        """What goes through the queue; the next array is the next batch's."""
        if self._slot is None:
            return batch
        written = io.BytesIO()
        _Pickler(written, self._starts).dump(batch)
        parcel = SlotRef(self._memory.name, self._slot, self._used, written.getvalue())
        self._memory.map(self._slot, _START)[_MARK] = 1
        self._slot, self._used, self._starts = None, _START, {}
        return parcel

    def _free(self) -> int:
        """The first slot that no batch is in."""
        slots = itertools.count(self._first, self._step)
        return next(slot for slot in slots if not self._memory.map(slot, _START)[_MARK])


@dataclass(frozen=True)
class SlotRef:
    """A batch whose arrays lie in a slot."""

    memory: int
    slot: int
    size: int  # bytes that are in use
    pickled: bytes  # the batch without them

    def open(self) -> Batch:
        """The batch, in the main process."""
        lent = _MEMORIES[self.memory].lent(self.slot, self.size)
        batch: Batch = _Unpickler(io.BytesIO(self.pickled), lent).load()
        return batch

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; called by the DataLoader's pinning thread."""
        return self.open().pin_memory()


class _Pickler(pickle.Pickler):
    """Tensors that begin where an array of the slot does stay there; all others travel along."""

    def __init__(self, file: io.BytesIO, starts: dict[int, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._starts = starts

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or not obj.is_contiguous():
            return None
        start = self._starts.get(obj.data_ptr())
        return None if start is None else (start, obj.dtype, tuple(obj.shape))

    def reducer_override(self, obj: Any) -> Any:
        return (torch.from_numpy, (obj.numpy(),)) if type(obj) is torch.Tensor else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, lent: torch.Tensor) -> None:
        super().__init__(file)
        self._lent = lent

    def persistent_load(self, pid: Any) -> torch.Tensor:
        start, dtype, shape = pid
        size = math.prod(shape) * dtype.itemsize
        return self._lent[start : start + size].view(dtype).view(shape)
