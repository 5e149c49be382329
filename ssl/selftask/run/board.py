"""Key-value store, hosted by rank 0, through which ranks monitor each other."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from selftask.distributed.world import read_world


class BoardLost(Exception):
    """Raised if the board is unreachable: rank 0 has exited or does not answer in time."""

    def __init__(self, silent_s: float | None = None) -> None:
        super().__init__("rank 0 has ended" if silent_s is None else "rank 0 does not answer")
        self.silent_s = silent_s  # None if the connection was closed


class Board:
    """Key-value store with a time limit per operation, separate from the process group's store.

    Most operations of torch's store have no time limit: a client waits forever if rank 0 is
    stopped. Operations therefore run in a thread, and the caller gives up after ``limit_s``
    seconds with ``BoardLost``. ``close`` ends the thread. Rank 0 hosts the store and calls it
    directly.

    Every rank must create a board, since rank 0 broadcasts its address in the process group.
    """

    def __init__(self, rank: int) -> None:
        kept = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False) if rank == 0 else None
        address: list[Any] = [None]
        if kept is not None:
            address = [(socket.gethostname(), os.getpid(), kept.port)]
        dist.broadcast_object_list(address, src=0)
        self.host, self.pid, port = address[0]  # host and process of rank 0
        self.limit_s = 30.0
        master = read_world().master  # the ranks have met there; the host's name may not resolve
        self._store = kept or TCPStore(
            master[0] if master else os.environ.get("MASTER_ADDR", self.host),
            port,
            None,
            False,
            timedelta(seconds=30),
            wait_for_workers=False,
        )
        self._is_ours = kept is not None
        self._lost: BoardLost | None = None
        self._requests: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._requests = SimpleQueue()
        if not self._is_ours:
            threading.Thread(target=self._serve, name="selftask board", daemon=True).start()

    @property
    def is_here(self) -> bool:
        """True if rank 0 is on this machine."""
        return bool(self.host == socket.gethostname())

    def close(self) -> None:
        """End the thread, after which the board must not be used."""
        self._requests.put(None)

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> str:
        """Return the value of an existing key; for a missing one, wait for the store's timeout."""
        return str(self._ask(self._store.get, key).decode())

    def has(self, key: str) -> bool:
        return bool(self._ask(self._store.check, [key]))

    def set_once(self, key: str, value: str) -> str:
        """Set a key unless it exists, and return the stored value."""
        return str(self._ask(self._store.compare_set, key, "", value).decode())

    def _ask(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a store operation.

        Raises:
            BoardLost: After a timeout or a lost connection, and immediately in every later call.
        """
        if self._is_ours:
            return operation(*args)
        if self._lost is not None:
            raise self._lost
        answer: Future[Any] = Future()
        self._requests.put((answer, operation, args))
        # Count seconds in which this process ran: it may have been suspended along with rank 0.
        if not any(wait([answer], timeout=1.0).done for _ in range(max(1, round(self.limit_s)))):
            self._lost = BoardLost(self.limit_s)
            raise self._lost
        try:
            return answer.result()
        except dist.DistError as error:
            self._lost = BoardLost()
            raise self._lost from error

    def _serve(self) -> None:
        while request := self._requests.get():
            answer, operation, args = request
            try:
                answer.set_result(operation(*args))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                answer.set_exception(error)
