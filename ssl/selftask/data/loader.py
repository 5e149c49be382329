"""Batches from worker processes that live as long as the run, from any step on."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from selftask.data.dataset import BadFiles, EvalDataset, Sample, ViewDataset
from selftask.data.device.ahead import Ahead
from selftask.data.reading import BadImage, last_file
from selftask.data.sampler import BatchSampler, Pool, Sampler
from selftask.data.samplers.shuffled import Shuffled
from selftask.data.views import ToFloat
from selftask.errors import UserError
from selftask.pulse import during

PREFETCH = 3  # batches that each worker makes ahead
PARENT_CHECK_S = 2.0  # how often a worker looks whether the main process is still there
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class Batches:
    """The training samples of this rank, one batch a step, without an end.

    ``start(step)`` goes to any global step in O(1) time; the samples do not depend on the number
    of workers or of ranks, nor on where the run was stopped. Workers are started once: the order
    of epochs is one endless sequence for them.

    A sample is a dict: ``views``, V float32 tensors (B, 3, H, W); ``target`` and ``index``, (B,)
    int64; ``epoch`` and ``step``, ints.
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
        """``batch_size`` is the global one. Raises ConfigError if it does not fit the data.

        Without a ``sampler``, each epoch shows every sample once, shuffled.
        """
        self.dataset = dataset
        self.num_workers = num_workers
        self.device = device or torch.device("cpu")
        self.bad_files = BadFiles(None, len(dataset)) if bad_files is None else bad_files
        chosen = sampler or Shuffled(None, Pool(len(dataset), batch_size, seed))
        self.sampler = BatchSampler(chosen, rank=rank, world_size=world_size)
        self.step = 0  # of the next batch
        self.data_wait_s = 0.0  # time that callers of next() have waited so far
        self._reader: Any = None
        self._ahead: Ahead | None = None  # makes the views on the device while it does a step

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def start(self, step: int) -> None:
        """Make ``step`` the next one; running workers are kept if it already is."""
        if self._reader is not None and step == self.step:
            return
        self.close()
        self.step = self.sampler.start = step
        self._reader = self._open_reader()
        if self.device.type == "cuda" and hasattr(self.dataset, "engine"):
            self._ahead = Ahead(self._make, self.device)

    def _open_reader(self) -> Any:
        """What gives the batches from ``sampler.start`` on, and can be closed."""
        return _Reader(self.dataset, self.sampler, self.num_workers, self.device)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The sample of the next step; raises UserError for bad files and dead workers."""
        started = time.perf_counter()
        self.start(self.step)
        sample = self._make() if self._ahead is None else self._ahead.next()
        sample["step"] = self.step
        self.step += 1
        self.data_wait_s += time.perf_counter() - started
        return sample

    def _make(self) -> dict[str, Any]:
        """The next batch of the workers, on the device."""
        assert self._reader is not None
        batch = next(self._reader)
        self.bad_files.add(batch.bad)
        if batch.num_left_out:
            raise UserError(
                "data: no readable image was found in place of an unreadable one; "
                f"{len(self.bad_files)} are known to be bad"
            )
        return {**batch.to_sample(self.device, self.dataset.to_float), "epoch": batch.epoch}

    def close(self) -> None:
        """Stop the workers."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._ahead = None


class EvalBatches:
    """All samples of a dataset in order, this rank's contiguous part of them.

    A sample has ``views`` (one tensor), ``input`` (the same), ``target`` and ``index``; images that
    cannot be read are left out, so count by ``index``.
    """

    def __init__(
        self,
        dataset: EvalDataset | ViewDataset,
        *,
        batch_size: int,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        bad_files: BadFiles | None = None,
    ) -> None:
        """``batch_size`` is that of one rank; the last batch may be smaller."""
        self.dataset = dataset
        self.num_workers = num_workers
        self.device = device or torch.device("cpu")
        self.bad_files = BadFiles(None, len(dataset)) if bad_files is None else bad_files
        share = -(-len(dataset) // world_size)
        self.indices = range(len(dataset))[rank * share : (rank + 1) * share]
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def _keys(self) -> Iterator[list[tuple[int, int]]]:
        for first in range(0, len(self.indices), self.batch_size):
            yield [(0, index) for index in self.indices[first : first + self.batch_size]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in _Reader(self.dataset, self._keys(), self.num_workers, self.device):
            self.bad_files.add(batch.bad)
            if batch.views:
                sample = batch.to_sample(self.device, self.dataset.to_float)
                yield {**sample, "input": sample["views"][0]}


@dataclass(frozen=True)
class Batch:
    """A batch on its way from a worker."""

    views: list[torch.Tensor]  # V uint8 (B, H, W, 3)
    target: torch.Tensor
    index: torch.Tensor
    epoch: int
    bad: list[BadImage]
    num_left_out: int
    problem: str = ""  # what the user has to put right, instead of views

    def pin_memory(self) -> Batch:
        """The same in page-locked memory; called by the DataLoader's pinning thread."""
        return replace(
            self,
            views=[view.pin_memory() for view in self.views],
            target=self.target.pin_memory(),
            index=self.index.pin_memory(),
        )

    def to_sample(self, device: torch.device, to_float: Sequence[ToFloat]) -> dict[str, Any]:
        """Views, target and index, on the device; there each view becomes what a network takes."""
        pixels = [view.to(device, non_blocking=True) for view in self.views]
        return {
            "views": [convert(view) for convert, view in zip(to_float, pixels, strict=True)],
            "target": self.target.to(device, non_blocking=True),
            "index": self.index.to(device, non_blocking=True),
        }


def collate(samples: list[Sample]) -> Batch:
    """Stack samples into contiguous tensors (in shared memory, when called in a worker)."""
    shown = [sample for sample in samples if sample.views]
    by_view = list(zip(*(sample.views for sample in shown), strict=True))
    problem = _problem(by_view)
    return Batch(
        views=[] if problem else [_stack(views) for views in by_view],
        target=torch.tensor([sample.target for sample in shown], dtype=torch.int64),
        index=torch.tensor([sample.index for sample in shown], dtype=torch.int64),
        epoch=samples[0].epoch,
        bad=[error for sample in samples for error in sample.bad],
        num_left_out=len(samples) - len(shown),
        problem=problem,
    )


def _stack(views: Sequence[np.ndarray]) -> torch.Tensor:
    stacked: torch.Tensor = default_collate([torch.from_numpy(view) for view in views])
    return stacked


class _Maker:
    """Whole batches of a dataset, as a DataLoader's fetcher asks for them.

    An error that the user can put right travels in the batch: raised in a worker it would arrive
    wrapped in torch's words and a traceback.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.collate = getattr(dataset, "collate", collate)  # that of the device engine is its own

    def __getitems__(self, keys: list[Any]) -> Batch:
        try:
            batch: Batch = self.collate([self.dataset[key] for key in keys])
        except UserError as error:
            none = torch.empty(0, dtype=torch.int64)
            return Batch([], none, none, 0, [], 0, problem=str(error))
        return batch


def _as_it_is(batch: Any) -> Any:
    return batch


class _Reader:
    """One DataLoader over a sequence of batches of keys, with errors a user can read."""

    def __init__(
        self, dataset: Any, batches: Iterable[Any], num_workers: int, device: torch.device
    ) -> None:
        maker: Any = _Maker(dataset)
        loader: DataLoader[Any] = DataLoader(
            maker,
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=device.type == "cuda",
            prefetch_factor=PREFETCH if num_workers else None,
            worker_init_fn=partial(_start_worker, os.getpid()),
            generator=torch.Generator(),  # its own: starting must not draw from the global one
        )
        others = set(multiprocessing.active_children())
        with _signals_of_the_main_process():
            self._iterator = iter(loader)
        self._workers: list[BaseProcess] = [
            process for process in multiprocessing.active_children() if process not in others
        ]
        _OPEN.append((weakref.ref(self), self._workers))
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # so that it runs before torch's own, which waits for workers

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Batch:
        try:
            with during("waiting for images"):
                batch: Batch = next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:  # OSError: a batch of a dead worker's
            death = _describe_death(self._workers)
            if death is None:
                raise
            raise UserError(death) from error
        if batch.problem:
            raise UserError(batch.problem)
        return batch

    def close(self) -> None:
        """Stop the workers, even if a traceback still holds on to the iterator."""
        shut_down = getattr(self._iterator, "_shutdown_workers", None)  # none without workers
        if shut_down is not None:
            shut_down()
        _kill(self._workers)
        _OPEN[:] = [entry for entry in _OPEN if any(worker.is_alive() for worker in entry[1])]


# Every reader that was not closed, if it still exists, and its workers, which exist anyway.
_OPEN: list[tuple[weakref.ref[_Reader], list[BaseProcess]]] = []


def _close_all() -> None:
    """Stop all workers at the exit of the main process.

    They ignore its SIGTERM, so that python, which waits for its children, would wait for ever.
    """
    for reader, workers in list(_OPEN):
        opened = reader()
        if opened is not None:
            opened.close()
        _kill(workers)


def _kill(workers: list[BaseProcess]) -> None:
    """What did not end when it was asked to: stuck in a read, or nobody was left to ask."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()


@contextmanager
def _signals_of_the_main_process() -> Iterator[None]:
    """Start workers so that signals stay the main process's affair.

    They begin with our signals blocked, lest one kills them before ``_start_worker`` runs. And
    the SIGCHLD handler that a DataLoader installs is taken back: it raises out of any line of the
    main thread, such as one that writes a checkpoint. The next read finds a dead worker anyway.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_worker(main: int, worker: int) -> None:
    """Leave signals to the main process, which saves a checkpoint and then lets workers go.

    torch's own look whether their parent is gone takes the parent they had when they began to work:
    a worker whose parent died before that would wait for ever. So ours looks for itself.
    """
    threading.Thread(target=_leave_with, args=(main,), daemon=True).start()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _leave_with(main: int) -> None:
    while os.getppid() == main:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _describe_death(workers: list[BaseProcess]) -> str | None:
    """How a worker ended that should still be alive, or None."""
    wait([worker.sentinel for worker in workers], timeout=1.0 if workers else 0)  # it may just end
    dead = next((worker for worker in workers if not worker.is_alive()), None)
    if dead is None:
        return None
    code = dead.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    hint = {
        -signal.SIGKILL: "; out of memory, perhaps: use fewer data.num_workers",
        -signal.SIGBUS: "; /dev/shm is too small, perhaps: use fewer data.num_workers",
    }.get(code, "")
    name = last_file(dead.pid or 0)
    reading = f"; the last image it began to read: {name}" if name else ""
    return f"data: worker process {dead.pid} {how}{reading}{hint}"


def _problem(by_view: list[tuple[np.ndarray, ...]]) -> str:
    """What to say if the pictures of a view make no batch; else nothing."""
    for number, views in enumerate(by_view):
        odd = next((view for view in views if view.dtype != np.uint8 or view.ndim != 3), None)
        if odd is not None:
            return (
                f"view {number}: its transforms gave {odd.dtype} of shape {odd.shape}; "
                "8-bit pictures (H, W, 3) are expected (normalize, the last one, makes floats)"
            )
        sizes = sorted({f"{view.shape[1]}x{view.shape[0]}" for view in views})
        if len(sizes) > 1:
            return (
                f"view {number}: its images have different sizes ({', '.join(sizes[:3])}) and make "
                "no batch; its transforms need a crop (random_resized_crop or center_crop)"
            )
    return ""
