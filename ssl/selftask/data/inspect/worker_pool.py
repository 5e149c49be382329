"""Pool of processes that apply a function to every image and may crash or hang on one.

A damaged file can crash a decoder or keep it busy forever. In this case one process is replaced,
and the image is reported. A pool of multiprocessing would wait forever or fail as a whole.
Processes are forked, so that they share the opened source; nothing here imports torch.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

import numpy as np

from selftask.data.reading.files import POLICY
from selftask.errors import RunError, describe_exit

MAX_PER_CHUNK = 32  # images sent to a process at once
DECODING_S = 60.0  # seconds, time limit of decoding one image
MAX_IDLE_DEATHS = 3  # processes in a row that may die before they read anything

T = TypeVar("T")
_Examine = Callable[[int], T]
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Lost:
    """Result of an image whose process died or was killed, and the reason."""

    reason: str


def patience_s() -> float:
    """Return the time limit of one image in seconds, after which its process is killed.

    It is infinite if reads have no time limit.
    """
    if POLICY.timeout_s <= 0:
        return float("inf")
    return POLICY.timeout_s * (POLICY.retries + 1) + DECODING_S


def map_images(
    examine: _Examine[T],
    indices: Sequence[int] | np.ndarray,
    num_workers: int,
    silence_s: float | None = None,
) -> Iterator[tuple[int, T | Lost]]:
    """Yield ``(index, examine(index))`` for each index, in any order, from several processes.

    Args:
        examine: Runs in a forked process; the result must be picklable. Errors end the iteration.
        indices: Indices of the images, (N,).
        num_workers: Number of processes.
        silence_s: Seconds without a result after which a process is killed; None:
            ``patience_s()``.

    Yields:
        An index and its result, or ``Lost`` if the process died or was killed.

    Raises:
        RunError: If ``examine`` raised an error, or processes die before they read anything.
    """
    silence_s = patience_s() if silence_s is None else silence_s
    num_workers = max(1, min(num_workers, len(indices)))
    size = max(1, min(MAX_PER_CHUNK, len(indices) // (8 * num_workers)))
    chunks = (indices[first : first + size] for first in range(0, len(indices), size))
    workers = [_Worker(examine) for _ in range(num_workers)]
    try:
        for worker in workers:
            worker.assign(next(chunks, ()))
        while busy := [worker for worker in workers if worker.assigned]:
            ready = wait([worker.connection for worker in busy], timeout=min(1.0, silence_s))
            for worker in busy:
                if worker.connection in ready:
                    yield from worker.receive()
                elif time.monotonic() - worker.heard > silence_s:
                    worker.process.kill()
                    yield from worker.replace(f"took longer than {silence_s:g} s")
                if not worker.assigned:
                    worker.assign(next(chunks, ()))
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join(timeout=5)
            worker.connection.close()


class _Worker(Generic[T]):
    """A process, and the images assigned to it in the order in which it reads them."""

    def __init__(self, examine: _Examine[T]) -> None:
        self._examine = examine
        self.assigned: deque[int] = deque()  # not yet reported
        self.heard = 0.0  # time of the last message to or from the process
        self._idle_deaths = 0
        self._start()

    def _start(self) -> None:
        self.connection, theirs = _fork.Pipe()
        self.process = _fork.Process(
            target=_work, args=(self._examine, theirs, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()  # so that we get an end of file when the process dies
        self._reads = False  # set by its first message

    def assign(self, indices: Sequence[int] | np.ndarray) -> None:
        """Send the numbers of more images to the process."""
        images = [int(index) for index in indices]
        self.assigned += images
        self.heard = time.monotonic()
        with suppress(OSError):  # the process is dead; the end of file is read next
            self.connection.send(images)

    def receive(self) -> Iterator[tuple[int, T | Lost]]:
        """Read a message and yield its results; replace the process if it died.

        Raises:
            RunError: If the process reports an error of ``examine``.
        """
        try:
            results = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(timeout=5)
            how = describe_exit(self.process.exitcode or 0)
            yield from self.replace(f"the process that read it {how}")
            return
        if isinstance(results, Exception):
            raise results
        self.heard, self._reads, self._idle_deaths = time.monotonic(), True, 0
        for result in results:
            yield self.assigned.popleft(), result

    def replace(self, reason: str) -> Iterator[tuple[int, Lost]]:
        """Start another process, and yield ``Lost`` for the image that the old one was reading.

        Nothing is yielded if the old one ended before its first message, which it sends when it is
        ready to read.

        Raises:
            RunError: If more than MAX_IDLE_DEATHS processes in a row ended so.
        """
        if self._reads:
            yield self.assigned.popleft(), Lost(reason)
        else:
            self._idle_deaths += 1
            if self._idle_deaths > MAX_IDLE_DEATHS:
                raise RunError(f"processes end before they have read anything: one {reason}")
        remaining = [*self.assigned]
        self.assigned.clear()
        self.connection.close()
        self._start()
        self.assign(remaining)


def _work(examine: _Examine[T], connection: Connection, parent: int) -> None:
    """Main function of a process: read images until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it
    warnings.simplefilter("ignore")  # decoders warn about files that are readable
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        connection.send([])
        while True:
            while not connection.poll(1.0):
                if os.getppid() != parent:
                    return  # the parent was killed; its other children keep our pipe open
            for index in connection.recv():
                connection.send(_result(examine, index))


def _result(examine: _Examine[T], index: int) -> list[T] | RunError:
    try:
        return [examine(index)]
    except Exception as error:  # noqa: BLE001 - raised again in the main process
        return RunError(f"image {index}: {type(error).__name__}: {error}")
