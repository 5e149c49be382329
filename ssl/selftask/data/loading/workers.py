"""Batches from worker processes, with readable errors and no processes left behind."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from selftask.config.values.auto_values import cores
from selftask.data.loading.collate import Allocator, BatchBuffer, RawBatch, broken
from selftask.data.loading.dataset import Dataset
from selftask.data.loading.shared_memory import SlotPool, SlotRef, SlotWriter
from selftask.data.reading.files import last_file
from selftask.distributed.accelerator import pins_memory
from selftask.distributed.heartbeat import activity
from selftask.distributed.out_of_memory import OutOfMemoryKills
from selftask.distributed.world import STOP_SIGNALS
from selftask.errors import RunError, UserError, describe_exit
from selftask.logs import get_logger

log = get_logger(__name__)

PREFETCH = 3  # batches prefetched by each worker
PARENT_CHECK_S = 2.0  # seconds between a worker's checks that the main process is alive


class _Maker:
    """Dataset for DataLoader whose items are whole batches.

    A UserError is sent in the batch. If it were raised in a worker, torch would wrap it in a
    message of its own with a traceback.
    """

    def __init__(self, dataset: Dataset, memory: SlotPool) -> None:
        self.dataset = dataset
        self.memory = memory
        self._outbox: SlotWriter | None = None  # only in a worker

    def __getitems__(self, keys: list[tuple[int, int]]) -> RawBatch | SlotRef:
        worker = get_worker_info()
        if worker is None:
            return self._make(keys, np.empty)
        if self._outbox is None:
            self._outbox = SlotWriter(self.memory, worker.id, worker.num_workers)
        started = time.perf_counter()
        batch = self._make(keys, self._outbox.new)
        return self._outbox.send(replace(batch, made_s=time.perf_counter() - started))

    def _make(self, keys: list[tuple[int, int]], new: Allocator) -> RawBatch:
        buffer = BatchBuffer(len(keys), new)
        samples = (self.dataset.sample(key, buffer.next) for key in keys)
        try:
            return self.dataset.collate(samples, buffer).with_draws(self.dataset.draw, new)
        except UserError as error:
            return broken(str(error))


@cache
def _warn_of_many(num_workers: int) -> None:
    """Warn if there are more workers than cores, once for each number of workers."""
    if num_workers > cores():
        log.warning("data.num_workers=%d: more than the %d cores there are", num_workers, cores())


class _Fork(ForkContext):
    """Context of multiprocessing that lists its processes; a fork inherits all that it needs.

    ``active_children()`` would also list workers that another thread starts at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[ForkProcess] = []

    def Process(self, *args: Any, **options: Any) -> ForkProcess:  # type: ignore[override]
        process = ForkProcess(*args, **options)
        self.processes.append(process)
        return process


class BatchReader:
    """Iterator that loads batches by their keys in worker processes, with readable errors.

    Args:
        dataset: Samples by key.
        batches: Keys of the samples of each batch.
        num_workers: Number of worker processes; 0: read in this process.
        device: Device that the caller copies the batches to; decides whether memory is pinned.

    Raises:
        RunError: If workers cannot be started or, while iterating, if a worker died.
        UserError: While iterating, if a batch has an error that the user must fix.
    """

    def __init__(
        self,
        dataset: Dataset,
        batches: Iterable[list[tuple[int, int]]],
        num_workers: int,
        device: torch.device,
    ) -> None:
        maker: Any = _Maker(dataset, SlotPool())
        self._kills = OutOfMemoryKills()
        _warn_of_many(num_workers)
        fork = _Fork()
        self._workers = fork.processes
        with _started(self._workers, num_workers), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # many workers
            loader: DataLoader[Any] = DataLoader(
                maker,
                batch_sampler=batches,
                num_workers=num_workers,
                multiprocessing_context=fork if num_workers else None,
                collate_fn=lambda batch: batch,
                pin_memory=pins_memory(device),
                prefetch_factor=PREFETCH if num_workers else None,
                worker_init_fn=partial(_start_worker, os.getpid()),
                generator=torch.Generator(),  # starting must not draw from the global generator
            )
            self._iterator = iter(loader)
        # The finalizer keeps the iterator alive. In a reference cycle, such as that of a traceback,
        # its queues would be closed before it can ask the workers to end.
        self._stop = weakref.finalize(self, _stop, self._iterator, self._workers)
        self._stop.atexit = False
        _OPEN[:] = [stop for stop in _OPEN if stop.alive] + [self._stop]
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # now, to run before torch's handler, which waits for workers

    def __iter__(self) -> BatchReader:
        return self

    def __next__(self) -> RawBatch:
        try:
            with activity("waiting for images"):
                received: RawBatch | SlotRef = next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:  # OSError: batch of a dead worker
            death = _describe_death(self._workers, self._kills)
            if death is None:
                raise
            raise RunError(death) from error
        batch = received.open() if isinstance(received, SlotRef) else received
        if batch.problem:
            raise UserError(batch.problem)
        return batch

    def close(self) -> None:
        """Stop the workers, even if a traceback still references the iterator."""
        self._stop()


_OPEN: list[weakref.finalize[..., BatchReader]] = []  # of readers that were not closed


def _close_all() -> None:
    """Stop all workers at the exit of the main process.

    Workers ignore SIGTERM, so Python would wait forever for them to exit.
    """
    for stop in _OPEN:
        stop()


def _stop(iterator: Any, workers: list[ForkProcess]) -> None:
    """Ask workers to end; kill those that do not, such as one that is stuck in a read."""
    shut_down = getattr(iterator, "_shutdown_workers", None)  # none without workers
    if shut_down is not None:
        shut_down()
    _kill(workers)


def _kill(workers: list[ForkProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()


@contextmanager
def _started(workers: list[ForkProcess], count: int) -> Iterator[None]:
    """Context for starting ``count`` workers, after which all of them run, or none does.

    Python would wait at its exit for those that were started before an error.
    """
    try:
        with _signals_of_the_main_process():
            yield
    except BaseException as error:
        _kill(workers)
        if not isinstance(error, OSError):
            raise
        raise RunError(
            f"data: {count} workers cannot be started: {error.strerror}; they need processes "
            "(ulimit -u, or the pids limit of a container or job), open files (ulimit -n) and a "
            "writable /dev/shm; use fewer data.num_workers, or 0"
        ) from error


@contextmanager
def _signals_of_the_main_process() -> Iterator[None]:
    """Context for starting workers that leaves signals to the main process.

    Workers start with STOP_SIGNALS blocked, so that none kills them before ``_start_worker`` runs.
    DataLoader installs a SIGCHLD handler that may raise in any line of the main thread, such as
    one that writes a checkpoint. The earlier handler is restored. The next read detects a dead
    worker anyway.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_worker(main: int, worker: int) -> None:
    """Ignore stop signals, watch the main process and use one thread.

    The main process handles the signals: it saves a checkpoint and then stops the workers. torch's
    parent check starts too late: it records the parent of a worker when the worker begins its loop.
    If the main process died before that, the worker would wait forever. So run our own check
    against the process id ``main``.
    """
    threading.Thread(target=_leave_with, args=(main,), daemon=True).start()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _leave_with(main: int) -> None:
    while os.getppid() == main:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _describe_death(workers: list[ForkProcess], kills: OutOfMemoryKills) -> str | None:
    """Return how a worker died, for a message; None if all workers are alive after a second."""
    # a failed worker may still be exiting
    wait([worker.sentinel for worker in workers], timeout=1.0 if workers else 0)
    dead = next((worker for worker in workers if not worker.is_alive()), None)
    if dead is None:
        return None
    code = dead.exitcode or 0
    no_memory = code in (-signal.SIGKILL, -signal.SIGBUS)  # SIGBUS: no memory for a slot
    memory = (kills.explain() or "out of memory, perhaps") if no_memory else ""
    hint = f"; {memory}; use fewer data.num_workers" if memory else ""
    name = last_file(dead.pid or 0)
    reading = f"; the last image it began to read: {name}" if name else ""
    return f"data: worker process {dead.pid} {describe_exit(code)}{reading}{hint}"
