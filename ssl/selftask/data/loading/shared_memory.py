"""Batches from workers to the main process, in shared memory that is reused.

torch creates a file in shared memory for every tensor, which both processes must map page by page:
about a third of a millisecond for 300 KB on a virtual machine. Here a worker writes a batch into a
*slot*, a range of one unnamed file that both processes map once, and sends only its position.

The first byte of a slot marks it as in use. The worker sets the mark when it hands the batch over.
The main process clears it when the last tensor that uses the slot is freed, and then the worker may
write there again. A worker never waits for a slot: if all are in use, it takes a new one. There are
therefore as many slots as batches were alive at the same time, each as large as its largest batch.
The file is not part of a file system (such as /dev/shm) and is freed when the last process closes
it.
"""

from __future__ import annotations

import errno
import io
import itertools
import math
import mmap
import os
import pickle
import tempfile
import weakref
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch

from selftask.data.loading.collate import RawBatch
from selftask.errors import UserError

_STRIDE = 1 << 36  # bytes between the starts of slots; unused ranges of the file take no memory
_START = 64  # offset of the first array behind the mark; aligns arrays to cache lines
_MARK = 0  # offset of the mark


class SlotPool:
    """Slots of all workers of a loader; created before the workers are forked."""

    def __init__(self) -> None:
        self.name = next(_NAMES)
        self._file = memory_file("selftask-batches")
        weakref.finalize(self, self._file.close)
        self._mapped: dict[int, mmap.mmap] = {}
        _MEMORIES[self.name] = self

    def map(self, slot: int, size: int) -> mmap.mmap:
        """Map at least ``size`` bytes of a slot into this process; raises UserError if it fails."""
        mapped = self._mapped.get(slot)
        if mapped is None or len(mapped) < size:
            try:
                mapped = self._mapped[slot] = self._map(slot, 1 << (size - 1).bit_length())
            except OSError as error:
                advice = "use fewer data.num_workers or smaller batches"
                if error.errno == errno.EFBIG:  # slots far apart exceed it, however small they are
                    advice = "set no limit of file sizes (ulimit -f), or data.num_workers=0"
                raise UserError(
                    f"data: no memory to share a batch of {size / 2**20:.0f} MiB: "
                    f"{error.strerror}; {advice}"
                ) from error
        return mapped

    def _map(self, slot: int, size: int) -> mmap.mmap:
        start, size = slot * _STRIDE, max(size, mmap.PAGESIZE)
        file = self._file.fileno()
        if os.fstat(file).st_size < start + size:  # ftruncate could cut off others' slots
            os.pwrite(file, b"\0", start + size - 1)
        return mmap.mmap(file, size, offset=start)

    def lent(self, slot: int, size: int) -> torch.Tensor:
        """Return a slot's first bytes, uint8 (size,), mark included.

        The slot is free again when the last tensor that uses them is freed.
        """
        mapping = self.map(slot, size)
        array: np.ndarray = np.ndarray((size,), np.uint8, buffer=mapping)
        weakref.finalize(array, _clear, mapping, os.getpid()).atexit = False
        return torch.from_numpy(array)


# Pools by name: DataLoader's pinning thread has only the batch, so a SlotRef holds the name.
_MEMORIES: weakref.WeakValueDictionary[int, SlotPool] = weakref.WeakValueDictionary()
_NAMES = itertools.count()


def _clear(mapping: mmap.mmap, owner: int) -> None:
    if os.getpid() == owner:  # a process forked in between must not clear it with its own copy
        mapping[_MARK] = 0


def memory_file(name: str) -> IO[bytes]:
    """Open a file in memory; unlike /dev/shm (64 MB in docker), only memory limits its size.

    On other systems than Linux, it is a temporary file on disk.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile()  # not Linux


class SlotWriter:
    """Writer of a worker's batches to the slots ``first``, ``first + step``, ... of a pool.

    Args:
        memory: The pool.
        first: First slot of the worker.
        step: Distance of its slots, the number of workers.
    """

    def __init__(self, memory: SlotPool, first: int, step: int) -> None:
        self._memory = memory
        self._first, self._step = first, step
        self._slot: int | None = None  # slot of the current batch, once it has an array
        self._used = _START
        self._starts: dict[int, int] = {}  # address of an array -> where it begins in the slot

    def new(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialized array in the current batch's slot, which the batch then owns."""
        if self._slot is None:
            self._slot = self._free()
        kind, start = np.dtype(dtype), self._used
        end = start + math.prod(shape) * kind.itemsize
        mapping = self._memory.map(self._slot, end)
        array: np.ndarray = np.ndarray(shape, kind, buffer=mapping, offset=start)
        self._starts[array.ctypes.data] = start
        self._used = -(-end // _START) * _START
        return array

    def send(self, batch: RawBatch) -> RawBatch | SlotRef:
        """Finish a batch; return what to send: a SlotRef, or the batch itself if it has no slot."""
        if self._slot is None:
            return batch
        written = io.BytesIO()
        _Pickler(written, self._starts).dump(batch)
        parcel = SlotRef(self._memory.name, self._slot, self._used, written.getvalue())
        self._memory.map(self._slot, _START)[_MARK] = 1
        self._slot, self._used, self._starts = None, _START, {}
        return parcel

    def _free(self) -> int:
        """Return the first slot that is not in use."""
        slots = itertools.count(self._first, self._step)
        return next(slot for slot in slots if not self._memory.map(slot, _START)[_MARK])


@dataclass(frozen=True)
class SlotRef:
    """Reference to a batch whose arrays are in a slot."""

    memory: int
    slot: int
    size: int  # bytes in use
    pickled: bytes  # the batch without the arrays in the slot

    def open(self) -> RawBatch:
        """Return the batch; called in the main process."""
        lent = _MEMORIES[self.memory].lent(self.slot, self.size)
        return _Unpickler(io.BytesIO(self.pickled), lent).load()

    def pin_memory(self) -> RawBatch:
        """Return the batch in page-locked memory; called by DataLoader's pinning thread."""
        return self.open().pin_memory()


class _Pickler(pickle.Pickler):
    """Pickler that stores tensors in the slot by reference, and other tensors by value."""

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
