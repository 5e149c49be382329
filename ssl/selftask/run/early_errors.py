"""Errors of a rank before the process group exists, passed to rank 0 in a file."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from selftask.distributed.world import World, read_world
from selftask.errors import RunError, UserError
from selftask.logs import read_json, write_json
from selftask.run.failure import Failure

_EVERY_S = 1.0


@contextmanager
def report_early_errors(out: str | Path) -> Iterator[None]:
    """Context that writes an error of a rank other than 0 to ``out/errors``, for rank 0.

    Otherwise rank 0 would wait for this rank until the launcher kills it, and would be reported as
    the cause.
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
            message += f" (on {socket.gethostname()})"
            with suppress(OSError):  # the error itself is raised in any case
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, {"attempt": world.attempt, "message": message})
        raise


def find_early_error(out: Path, attempt: str) -> Failure | None:
    """Return the first error that a rank wrote in this attempt, or None."""
    for path in sorted((out / "errors").glob("early_rank*.json")):
        content = read_json(path)
        if content.get("attempt") == attempt:
            rank = int(path.stem.removeprefix("early_rank"))
            return Failure(rank, str(content.get("message")))
    return None


@contextmanager
def watch_others(out: Path, world: World, report: Callable[[Failure], None]) -> Iterator[None]:
    """Context in which a thread of rank 0 reports an early error and ends the process.

    A thread is needed because the main thread waits for the other ranks in torch's C++ code, which
    cannot be interrupted.

    Args:
        out: The run folder.
        world: This process; the thread is started on rank 0 only.
        report: Called with the failure before the process exits with code 1.
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
