"""Report errors and missing ranks before the process group exists, through files in the run."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from selftask.distributed.world import World, read_world
from selftask.errors import RunError, UserError
from selftask.logs import get_logger, read_json, write_json
from selftask.run.failure import Failure

log = get_logger(__name__)

_EVERY_S = 1.0
_TELL_S = 60.0  # interval between warnings about ranks that have not arrived
_MOST = 12  # largest number of ranks in a warning


@contextmanager
def report_early_errors(out: str | Path) -> Iterator[None]:
    """Context that writes an error of a rank other than 0 to ``out/errors``, where rank 0 reads it.

    Otherwise rank 0 would wait for this rank until the launcher kills rank 0, which would then be
    reported as the cause.
    """
    world = read_world()
    path = _path(Path(out), world.rank)
    if world.rank:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            _sign(Path(out), world.rank).unlink(missing_ok=True)
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
    """Context for creating the process group, in which a thread of rank 0 watches the others.

    The thread ends the process after an error of another rank. Once a minute it logs which ranks
    have not arrived. A thread is needed because the main thread waits for the other ranks in
    torch's C++ code, which cannot be interrupted.

    Args:
        out: The run folder.
        world: This process; the thread is started on rank 0 only.
        report: Called with the failure before the process exits with code 1.
    """
    over = threading.Event()
    sign = _sign(out, world.rank)

    def watch() -> None:
        began = told = time.monotonic()
        while not over.wait(_EVERY_S):
            failure = find_early_error(out, world.attempt)
            if failure is not None and not over.is_set():
                report(failure)
                os._exit(1)
            if time.monotonic() - told >= _TELL_S and (missing := missing_ranks(out, world)):
                told = time.monotonic()
                log.warning("%s", _waiting(missing, world.size, told - began, out))

    if world.size > 1:
        with suppress(OSError):
            sign.parent.mkdir(parents=True, exist_ok=True)
            write_json(sign, {"attempt": world.attempt, "host": socket.gethostname()})
        if world.rank == 0:
            threading.Thread(target=watch, name="selftask early errors", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if world.size > 1:
            with suppress(OSError):
                sign.unlink(missing_ok=True)
                sign.parent.rmdir()  # succeeds for the last rank, if the folder is empty


def missing_ranks(out: Path, world: World) -> list[int]:
    """Return the ranks that have not arrived in ``watch_others`` in this attempt."""
    attempts = {rank: read_json(_sign(out, rank)).get("attempt") for rank in range(1, world.size)}
    return [rank for rank, attempt in attempts.items() if attempt != world.attempt]


def _waiting(missing: list[int], size: int, seconds: float, out: Path) -> str:
    named = ", ".join(map(str, missing[:_MOST])) + (", ..." if missing[_MOST:] else "")
    return (
        f"waiting for rank {named} of {size} for {seconds:.0f} s: not started, or busy before all "
        f"meet (reading the data); each leaves a file in {out / 'errors'} when it arrives"
    )


def _path(out: Path, rank: int) -> Path:
    return out / "errors" / f"early_rank{rank}.json"


def _sign(out: Path, rank: int) -> Path:
    return out / "errors" / f"arrived_rank{rank}.json"
