"""Report errors and missing ranks before the process group exists, by files in the run folder."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from selftask.distributed.world import World, read_world
from selftask.errors import message_of
from selftask.logs import get_logger, read_json, write_json
from selftask.logs.lines import flush_lines
from selftask.run.failure import Failure

log = get_logger(__name__)

_EVERY_S = 1.0
_WARN_S = 60.0  # interval between warnings about ranks that have not arrived
_SKEW_S = 15.0  # by which a rank may start before rank 0, or its clock be behind
_MOST = 12  # largest number of ranks in a warning
_STARTED = time.time()  # of this process; files of rank 0 from before are of an earlier attempt
_PRESENT = ("running", "finished")  # states of a run whose rank 0 has not ended early


@contextmanager
def report_early_errors(out: str | Path) -> Iterator[None]:
    """Context that writes an error of this rank to ``out/errors``, where the other ranks read it.

    The error is raised again. A single process writes nothing. Without the file, the other ranks
    would wait until the launcher kills them, and would then be reported as the cause. Files of this
    rank from an earlier attempt are removed first.
    """
    world = read_world()
    path = _error_file(Path(out), world.rank)
    if world.size > 1:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            _arrival_file(Path(out), world.rank).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        if world.size > 1:
            message = f"{message_of(error)} (on {socket.gethostname()})"
            with suppress(OSError):  # the error itself is raised in any case
                path.parent.mkdir(parents=True, exist_ok=True)
                content = {"attempt": world.attempt, "message": message, "updated": time.time()}
                write_json(path, content)
        raise


def find_early_error(out: Path, attempt: str, since: float = 0.0) -> Failure | None:
    """Return an error that a rank wrote in this attempt, or None.

    Args:
        out: The run folder.
        attempt: Identifier of this attempt.
        since: Time in seconds since 1970; older errors are of an earlier attempt.
    """
    for path in sorted((out / "errors").glob("early_rank*.json")):
        content = read_json(path)
        if content.get("attempt") == attempt and content.get("updated", 0.0) >= since:
            rank = int(path.stem.removeprefix("early_rank"))
            return Failure(rank, str(content.get("message")))
    return None


def find_end_of_rank0(out: Path, attempt: str, since: float) -> Failure | None:
    """Return how rank 0 ended in this attempt, from its files; None if it may still arrive.

    Args:
        out: The run folder.
        attempt: Identifier of this attempt; if ranks are started by hand, earlier attempts may have
            the same one.
        since: Time at which this rank started, in seconds since 1970. Older files are ignored,
            since rank 0 may restart.
    """
    early, status = read_json(_error_file(out, 0)), read_json(out / "status.json")
    is_over = status.get("state", "running") not in _PRESENT
    for content, is_end in ((early, bool(early)), (status, is_over)):
        if is_end and content.get("attempt") == attempt and content.get("updated", 0.0) >= since:
            message = content.get("message") or content.get("error")
            failure = Failure(0, str(message or f"{status['state']} by {status.get('by')}"))
            failure.rank0_hears = content is status  # else its end may not be reported yet
            return failure
    return None


@contextmanager
def watch_others(out: Path, world: World, report: Callable[[Failure], None]) -> Iterator[None]:
    """Context for creating the process group, in which a thread watches the other ranks.

    On rank 0, the thread ends the process after an error of another rank; on the other ranks, after
    the end of rank 0. Once a minute rank 0 logs which ranks have not arrived. A thread is needed
    because the main thread waits for the other ranks in torch's C++ code, which cannot be
    interrupted.

    Args:
        out: The run folder.
        world: This process.
        report: Called with the failure before the process exits with code 1.
    """
    over = threading.Event()
    arrival = _arrival_file(out, world.rank)
    # started on each machine by hand, a second attempt may be named like the first
    by_hand = world.launcher in ("torchrun", "mpi")
    since = _STARTED - _SKEW_S if by_hand else 0.0

    def watch() -> None:
        began = warned = time.monotonic()
        while not over.wait(_EVERY_S):
            if world.rank:
                failure = find_end_of_rank0(out, world.attempt, _STARTED)
            else:
                failure = find_early_error(out, world.attempt, since)
            if failure is not None and not over.is_set():
                report(failure)
                _end_process(world.rank, failure)
            if world.rank == 0 and time.monotonic() - warned >= _WARN_S:
                warned = time.monotonic()
                if missing := missing_ranks(out, world):
                    log.warning("%s", _waiting(missing, world.size, warned - began, out))

    if world.size > 1:
        with suppress(OSError):
            arrival.parent.mkdir(parents=True, exist_ok=True)
            write_json(arrival, {"attempt": world.attempt, "host": socket.gethostname()})
        threading.Thread(target=watch, name="selftask early errors", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if world.size > 1:
            with suppress(OSError):
                arrival.unlink(missing_ok=True)
                arrival.parent.rmdir()  # succeeds for the last rank, if the folder is empty


def _end_process(rank: int, failure: Failure) -> NoReturn:
    """Exit from a thread, since the main thread cannot be interrupted."""
    if rank:  # its log is in a file
        text = f"rank {rank} stops: rank 0 has ended: {failure.message}"
        print(text, file=sys.stderr, flush=True)
    flush_lines()
    os._exit(1)


def missing_ranks(out: Path, world: World) -> list[int]:
    """Return the ranks but 0 that have not entered ``watch_others`` in this attempt."""
    files = {rank: _arrival_file(out, rank) for rank in range(1, world.size)}
    return [r for r, file in files.items() if read_json(file).get("attempt") != world.attempt]


def _waiting(missing: list[int], size: int, seconds: float, out: Path) -> str:
    named = ", ".join(map(str, missing[:_MOST])) + (", ..." if missing[_MOST:] else "")
    return (
        f"waiting for rank {named} of {size} for {seconds:.0f} s: not started, or busy before all "
        f"meet (reading the data); each leaves a file in {out / 'errors'} when it arrives"
    )


def _error_file(out: Path, rank: int) -> Path:
    return out / "errors" / f"early_rank{rank}.json"


def _arrival_file(out: Path, rank: int) -> Path:
    return out / "errors" / f"arrived_rank{rank}.json"
