"""Training and evaluation batches on the device, from any step on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import torch

from selftask.batch import Batch
from selftask.config.schema import DataConfig
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.collate import RawBatch
from selftask.data.loading.dataset import Dataset, ViewDataset
from selftask.data.loading.prefetch import Prefetcher
from selftask.data.loading.workers import BatchReader
from selftask.data.sampling.sampler import BatchSampler, Pool, Sampler
from selftask.data.sampling.shuffled import Shuffled
from selftask.data.source import Source
from selftask.distributed.accelerator import is_accelerator
from selftask.errors import UserError, join_some


class Batches:
    """Endless iterator over this rank's part of the global training batches.

    ``start(step)`` seeks to any global batch in O(1) time. The samples do not depend on the number
    of workers or ranks, nor on where the run was stopped. Workers are started once, for all epochs.

    If an unreadable image was replaced, ``labels`` and ``index`` of the batch belong to the
    replacement. ``key``, on which random draws depend, belongs to the requested image.
    """

    def __init__(
        self,
        dataset: ViewDataset,
        *,
        batch_size: int,
        seed: int,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        bad_files: BadFiles | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Set up the sampler; workers are started later.

        Args:
            dataset: Training samples by key.
            batch_size: Global batch size; used only without ``sampler``.
            seed: Seed of the order; used only without ``sampler``.
            num_workers: Number of worker processes; 0: read in this process.
            rank: This rank.
            world_size: Number of ranks.
            device: Device of the batches; None: the CPU.
            bad_files: Record of unreadable images; None: kept in memory only.
            sampler: Sampler of each epoch; None: every sample once, shuffled.

        Raises:
            ConfigError: If the batch size does not fit the data or the number of ranks.
        """
        self.dataset = dataset
        self.num_workers = num_workers
        self.device = device or torch.device("cpu")
        self.bad_files = BadFiles(None, len(dataset)) if bad_files is None else bad_files
        chosen = sampler or Shuffled(None, Pool(len(dataset), batch_size, seed))
        self.sampler = BatchSampler(chosen, rank=rank, world_size=world_size)
        self.step = 0  # number of the next global batch
        self.data_wait_s = 0.0  # time that callers of next() have waited so far
        self.made_s: deque[float] = deque(maxlen=16)  # time that a worker took for each batch
        self._reader: Any = None
        self._ahead: Prefetcher | None = None  # makes the next views on the device during a step

    def start(self, step: int) -> None:
        """Start the workers at global batch ``step``; do nothing if they run and it is the next."""
        if self._reader is not None and step == self.step:
            return
        self.close()
        self.step = self.sampler.start = step
        self._reader = self._open_reader()
        if is_accelerator(self.device) and self.dataset.makes_views_on_device:
            self._ahead = Prefetcher(self._make, self.device)

    def _open_reader(self) -> Any:
        """Return an iterator over the batches from ``sampler.start`` on, with ``close()``."""
        return BatchReader(self.dataset, self.sampler, self.num_workers, self.device)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            UserError: If too many files are bad, one has no readable replacement, or samples have
                an error that the user must fix.
            RunError: If a worker died or cannot be started.
        """
        started = time.perf_counter()
        self.start(self.step)
        batch = self._make() if self._ahead is None else self._ahead.next()
        batch.number = self.step
        self.step += 1
        self.data_wait_s += time.perf_counter() - started
        return batch

    def _make(self) -> Batch:
        """Return the next batch of the workers, on the device; raises as ``__next__``."""
        assert self._reader is not None
        batch = next(self._reader)
        self.made_s.append(batch.made_s)
        self.bad_files.add(batch.bad)
        if batch.num_left_out:
            known = [f"{path}: {why}" for path, why in self.bad_files.reasons.items()]
            raise UserError(
                "data: no readable image was found in place of an unreadable one; these cannot be "
                f"read: {join_some(known, 3) or 'those that storage did not give'}"
            )
        return batch.finish(self.dataset, self.device)

    def close(self) -> None:
        """Stop the workers and drop the batch read ahead; iterating again starts new workers."""
        if self._reader is not None:
            self._reader.close()
        if self._ahead is not None:
            self._ahead.close()
        self._reader = self._ahead = None


class EvalBatches:
    """Batches of this rank's contiguous part of a dataset, in order.

    ``input`` of a batch is the first view. Samples without views (unreadable images of an
    EvalDataset) are skipped and recorded, so use ``index`` to identify samples. Workers are started
    anew for each iteration, which raises UserError if more images are unreadable than ``bad_files``
    allows.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        bad_files: BadFiles | None = None,
    ) -> None:
        """Divide the samples among ranks and batches; workers are started later.

        Args:
            dataset: Samples by key; the epoch of the keys is 0.
            batch_size: Number of samples of a batch on this rank; the last batch may be smaller.
            num_workers: Number of worker processes; 0: read in this process.
            rank: This rank.
            world_size: Number of ranks.
            device: Device of the batches; None: the CPU.
            bad_files: Record of unreadable images; None: kept in memory only.
        """
        self.dataset = dataset
        self.num_workers = num_workers
        self.device = device or torch.device("cpu")
        self.bad_files = BadFiles(None, len(dataset)) if bad_files is None else bad_files
        first, stop = (len(dataset) * part_number // world_size for part_number in (rank, rank + 1))
        part = range(first, stop)  # as many as on other ranks, or one more or less
        self.batches: Sequence[Sequence[int]] = in_batches(part, batch_size)  # image indices

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        source: Source,
        data: DataConfig,
        *,
        batch_size: int,
        device: torch.device,
        key: str,
    ) -> EvalBatches:
        """Return batches of all samples, with the workers and the limit of bad files of ``data``.

        Args:
            dataset: Samples of the source.
            source: The images, which are counted for the limit.
            data: Config of the data.
            batch_size: Number of samples of a batch; the last one may be smaller.
            device: Device that the batches are moved to.
            key: Config key of the images, for messages.
        """
        return cls(
            dataset,
            batch_size=batch_size,
            num_workers=data.num_workers,
            device=device,
            bad_files=BadFiles.of(source, data, None, key),
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for raw in self.read():
            batch = raw.finish(self.dataset, self.device)
            batch.input = batch.all_views[0]
            yield batch

    def read(self) -> Iterator[RawBatch]:
        """Yield the batches as the workers return them, except those without views.

        Unreadable images are recorded; UserError is raised if there are too many.
        """
        keys = ([(0, index) for index in batch] for batch in self.batches)
        with closing(BatchReader(self.dataset, keys, self.num_workers, self.device)) as reader:
            for batch in reader:
                self.bad_files.add(batch.bad)
                if batch.views:
                    yield batch


def in_batches(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    """Divide indices into batches of ``size``; the last one may be smaller."""
    return [indices[first : first + size] for first in range(0, len(indices), size)]


def in_equal_numbers(count: int, size: int, rank: int, world_size: int) -> list[Sequence[int]]:
    """Return the image indices of this rank's batches; all ranks have the same number of batches.

    The ranks have consecutive parts. With one rank the batches are those of ``in_batches``.

    Args:
        count: Number of images. If it is less than the number of ranks, some have no batch.
        size: Largest number of images in a batch. If it is 1, some batches have 2, so that all
            ranks have the same number of batches.
        rank: This rank.
        world_size: Number of ranks.
    """
    if world_size == 1:
        return in_batches(range(count), size)
    share = -(-count // world_size)
    num_batches = max(1, min(-(-share // size), count // world_size))
    numbers = range(rank * num_batches, (rank + 1) * num_batches + 1)
    edges = [number * count // (world_size * num_batches) for number in numbers]
    return [range(first, last) for first, last in pairwise(edges) if first < last]
