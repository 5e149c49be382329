"""Errors of a rank before the ranks have met: no collective can carry them, so a file does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from selftask.errors import RunError, UserError
from selftask.launch.failure import Failure
from selftask.logs import read_json, write_json
from selftask.world import World, read_world

_EVERY_S = 1.0


@contextmanager
def early_errors_told(out: str | Path) -> Iterator[None]:
    """Context in which an error of a rank other than 0 is left in ``out/errors`` for rank 0.

    Rank 0 would wait for this rank, be ended by the launcher, and be taken for the cause.
    """
    world = read_world()
    path = _path(Path(out), world.rank)
    if world.rank:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        if world.rank:
            known = isinstance(error, UserError | RunError)
            message = str(error) if known else f"{type(error).__name__}: {error}"
            with suppress(OSError):  # it is raised in any case
                path.parent.mkdir(parents=True, exist_ok=True)
                host = f"{message} (on {socket.gethostname()})"
                write_json(path, {"attempt": world.attempt, "message": host})
        raise


def find_early_error(out: Path, attempt: str) -> Failure | None:
    """What a rank has left there in this attempt."""
    for path in sorted((out / "errors").glob("early_rank*.json")):
        told = read_json(path)
        if told.get("attempt") == attempt:
            rank = int(path.stem.removeprefix("early_rank"))
            return Failure(rank, str(told.get("message")))
    return None


@contextmanager
def watch_others(out: Path, world: World, report: Callable[[Failure], None]) -> Iterator[None]:
    """Context in which rank 0 looks for errors of the others, reports one and ends the process.

    It waits for them in torch's C++ code, which nothing interrupts.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY_S):
            failure = find_early_error(out, world.attempt)
            if failure is not None and not over.is_set():
                report(failure)
                os._exit(1)

    if world.rank == 0 and world.size > 1:
        threading.Thread(target=watch, name="selftask early errors", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _path(out: Path, rank: int) -> Path:
    return out / "errors" / f"early_rank{rank}.json"
