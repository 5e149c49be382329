"""Pool of processes that apply a function to every image and may crash or hang on one.

A damaged file can crash a decoder or keep it busy forever. Then one process is replaced, and the
image is reported. The pools of multiprocessing would wait or fail as a whole. Processes are forked,
so that they share the opened source; nothing here imports torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import numpy as np

from selftask.data.reading.files import POLICY
from selftask.errors import RunError, describe_exit

MAX_PER_CHUNK = 32  # images sent to a process at once
NEWS_EVERY_S = 0.5  # interval of reports from a process
DECODING_S = 60.0  # seconds, time limit of decoding one image
MAX_IDLE_DEATHS = 3  # processes in a row that may die before they read anything

T = TypeVar("T")
_Look = Callable[[int], T]
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Lost:
    """Result of an image whose process died or was killed, and the reason."""

    reason: str


def patience_s() -> float:
    """Return the time limit of one image in seconds, after which its process is killed."""
    if POLICY.timeout_s <= 0:
        return float("inf")
    return POLICY.timeout_s * (POLICY.retries + 1) + DECODING_S


def map_images(
    look: _Look[T],
    indices: Sequence[int] | np.ndarray,
    num_workers: int,
    silence_s: float | None = None,
) -> Iterator[tuple[int, T | Lost]]:
    """Yield ``(index, look(index))`` for each index in any order, computed in several processes.

    Args:
        look: Runs in a forked process; its result must be picklable. Its errors end the iteration.
        indices: Indices of the images, (N,).
        num_workers: Number of processes.
        silence_s: Seconds without a report after which a process is killed; None:
            ``patience_s()``.

    Yields:
        An index and its result, or ``Lost`` if the process died or was killed.

    Raises:
        RunError: If ``look`` raised an error, or processes die before they read anything.
    """
    crew = _Crew(look, indices, num_workers, patience_s() if silence_s is None else silence_s)
    try:
        yield from crew.results()
    finally:
        crew.close()


@dataclass(eq=False)
class _Worker(Generic[T]):
    number: int  # index of the process in ``current``
    process: Any
    connection: Connection
    chunk: list[int] = field(default_factory=list)  # images sent and not yet reported
    heard: float = 0.0  # time of the last report


class _Crew(Generic[T]):
    def __init__(
        self,
        look: _Look[T],
        indices: Sequence[int] | np.ndarray,
        num_workers: int,
        silence_s: float,
    ) -> None:
        self.look = look
        self.silence_s = silence_s
        num_workers = max(1, min(num_workers, len(indices)))
        size = max(1, min(MAX_PER_CHUNK, len(indices) // (8 * num_workers)))
        self.starts = iter(range(0, len(indices), size))  # starts of unassigned chunks
        self.indices, self.size = indices, size
        self.again: deque[list[int]] = deque()  # remaining images of lost processes
        self.current = _fork.RawArray("q", [-1] * num_workers)  # image that each process works on
        self.idle_deaths = 0
        self.workers = [self._start(number) for number in range(num_workers)]

    def results(self) -> Iterator[tuple[int, T | Lost]]:
        for worker in self.workers:
            self._give(worker)
        while busy := [worker for worker in self.workers if worker.chunk]:
            ready = wait([worker.connection for worker in busy], timeout=min(1.0, self.silence_s))
            for worker in busy:
                if worker.connection in ready:
                    yield from self._news_of(worker)
                elif time.monotonic() - worker.heard > self.silence_s:
                    worker.process.kill()
                    yield from self._replace(worker, f"took longer than {self.silence_s:g} s")

    def close(self) -> None:
        """Kill all processes."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join(timeout=5)
            worker.connection.close()

    def _start(self, number: int) -> _Worker[T]:
        ours, theirs = _fork.Pipe()
        process = _fork.Process(
            target=_work, args=(self.look, theirs, self.current, number, os.getpid()), daemon=True
        )
        process.start()
        theirs.close()  # so that we get an end of file when the process dies
        return _Worker(number, process, ours)

    def _give(self, worker: _Worker[T]) -> None:
        if self.again:
            worker.chunk = self.again.popleft()
        elif (start := next(self.starts, None)) is not None:
            worker.chunk = [int(index) for index in self.indices[start : start + self.size]]
        else:
            return
        worker.heard = time.monotonic()
        self.current[worker.number] = -1
        with suppress(OSError):  # the process is dead; the end of file is read next
            worker.connection.send(worker.chunk)

    def _news_of(self, worker: _Worker[T]) -> Iterator[tuple[int, T | Lost]]:
        try:
            news = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(timeout=5)
            how = describe_exit(worker.process.exitcode)
            yield from self._replace(worker, f"the process that read it {how}")
            return
        if isinstance(news, Exception):
            raise news
        worker.heard = time.monotonic()
        self.idle_deaths = 0
        reported = {index for index, _ in news}
        worker.chunk = [index for index in worker.chunk if index not in reported]
        yield from news
        if not worker.chunk:
            self._give(worker)

    def _replace(self, worker: _Worker[T], reason: str) -> Iterator[tuple[int, T | Lost]]:
        """Replace a lost process; its current image is not tried again."""
        index = self.current[worker.number]
        rest = [other for other in worker.chunk if other != index]
        if index in worker.chunk:
            yield index, Lost(reason)
        else:
            self.idle_deaths += 1
            if self.idle_deaths > MAX_IDLE_DEATHS:
                raise RunError(f"processes end before they have read anything: one {reason}")
        if rest:
            self.again.append(rest)
        worker.connection.close()
        new = self._start(worker.number)
        self.workers[self.workers.index(worker)] = new
        self._give(new)


def _work(look: _Look[T], connection: Connection, current: Any, number: int, parent: int) -> None:
    """Main function of a process: work on chunks until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it
    warnings.simplefilter("ignore")  # decoders warn about files that are readable
    while True:
        while not connection.poll(1.0):
            if os.getppid() != parent:
                return  # the parent was killed; its other children keep our pipe open
        try:
            chunk = connection.recv()
            _look_at_chunk(look, chunk, connection, current, number)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _look_at_chunk(
    look: _Look[T], chunk: list[int], connection: Connection, current: Any, number: int
) -> None:
    news: list[tuple[int, T]] = []
    said = time.monotonic()
    for index in chunk:
        current[number] = index
        try:
            news.append((index, look(index)))
        except Exception as error:  # noqa: BLE001 - raised again in the main process
            connection.send(RunError(f"image {index}: {type(error).__name__}: {error}"))
            return
        if time.monotonic() - said > NEWS_EVERY_S:
            connection.send(news)
            news, said = [], time.monotonic()
    if news:
        connection.send(news)
