"""The folder of a run: there, writable, and of no other run while this one lasts."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from selftask.errors import UserError
from selftask.logs import get_logger

log = get_logger(__name__)

LOCK = ".lock"  # in the folder; the lock is the kernel's and ends with the process, however it ends
_HELD = (errno.EACCES, errno.EAGAIN)  # by another process
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems


@contextmanager
def held(out: str, *, first: bool) -> Iterator[Path]:
    """Context in which ``out`` is there, and no other run writes to it; ``first``: on rank 0.

    Two runs would cut each other's metrics and remove each other's half-written checkpoints.
    Raises UserError if another one has it, or if it cannot be written to.
    """
    if not out.strip():
        raise UserError("out is empty; give the folder of the run, such as out=runs/mine")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", encoding="utf-8") if first else None
    except OSError as error:
        raise UserError(f"out={out}: cannot be written to ({error.strerror})") from error
    try:
        if lock is not None:
            _take(lock, out)
        yield folder
    finally:
        if lock is not None:
            lock.close()


def is_held(folder: Path) -> bool:
    """Whether a run of another process has the folder just now; False where there are no locks."""
    try:
        with (folder / LOCK).open("r+", encoding="utf-8") as lock:
            _lock(lock)
    except OSError as error:
        return error.errno in _HELD
    return False


def _lock(file: IO[str]) -> None:
    """Of the process, not of the file: a worker that outlives a killed run does not keep it."""
    import fcntl

    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _take(lock: IO[str], out: str) -> None:
    try:
        _lock(lock)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            log.info("out=%s: no locks there, so two runs in it are not noticed", out)
            return
        if error.errno not in _HELD:
            raise
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        if int(os.environ.get("SLURM_RESTART_COUNT", 0)):
            log.info("out=%s: taken over from %s, whose job SLURM has started again", out, holder)
            return  # a node that died may leave its lock with the file server for a while
        raise UserError(
            f"out={out}: {holder} is training there; wait for it, stop it, or use another out="
        ) from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
