"""Create the run folder, check write access, and lock it against other runs."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from selftask.checkpoint.mirror import Stamp, fetch_run
from selftask.config.schema import Config
from selftask.distributed.world import World, launch_name
from selftask.errors import UserError
from selftask.files.addresses import is_remote, work_folder

LOCK = ".lock"  # file in the run folder; the kernel releases the lock when the process ends
_HELD = (errno.EACCES, errno.EAGAIN)  # locked by another process
TOUCH_S = 5.0  # interval at which a run touches its lock file
TAKE_OVER_S = 180.0  # age at which a lock file belongs to a dead node; NFS caches for 60 s
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # raised by some network file systems


@contextmanager
def locked(out: str, *, first: bool, alone: bool = False) -> Iterator[Path]:
    """Context that creates and locks the run folder, and yields its local path.

    Without the lock, two runs would truncate each other's metrics and remove each other's
    incomplete checkpoints. A folder that was created for a run is removed again if a UserError
    ended the run before it began.

    Args:
        out: The run folder or its address.
        first: True on rank 0, which takes the lock.
        alone: True if this is the only process, which may remove the folder.

    Raises:
        UserError: If the folder is not writable, or another run has locked it.
    """
    folder = work_folder(out)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", encoding="utf-8") if first else None
    except FileExistsError as error:  # also for a link into a disk that is not mounted
        problem = f"{error.filename} is a file, or a link to a folder that does not exist"
        raise UserError(f"out={out}: cannot be written to ({problem})") from error
    except OSError as error:
        raise UserError(f"out={out}: cannot be written to ({error.strerror})") from error
    over = threading.Event()
    ours: list[Path] = []  # folders to remove; none if another run has the lock
    try:
        if lock is not None:
            _lock_folder(lock, folder / LOCK, out)
            ours = created
            threading.Thread(target=_touch, args=(folder / LOCK, over), daemon=True).start()
        yield folder
    except UserError:
        if alone:
            _remove_unused(ours)
        raise
    finally:
        over.set()
        if lock is not None:
            lock.close()


def _remove_unused(created: list[Path]) -> None:
    """Remove the folders that were made, innermost first, if no run has begun in them."""
    if not created or any(path.name not in (LOCK, "log.txt") for path in created[0].iterdir()):
        return
    for path in created[0].iterdir():
        path.unlink()
    for folder in created:
        if any(folder.iterdir()):  # used by another run in the meantime
            return
        folder.rmdir()


def check_free(out: str) -> None:
    """Raise UserError if another process has locked the run folder."""
    lock = work_folder(out) / LOCK
    if out.strip() and is_held(lock.parent):
        raise _refusal(out, _holder(lock)[0])


def fetch_out(config: Config, world: World) -> dict[str, Stamp] | None:
    """Download a remote ``out`` to the local run folder before the run starts.

    The first rank of the machine downloads; the others wait for it.

    Args:
        config: The config of the run.
        world: This process.

    Returns:
        The stamps of the downloaded files, for ``mirrored``; None if ``out`` is local, and on all
        ranks but the first of the machine.

    Raises:
        UserError: If another run on this machine uses the folder, if the address cannot be read,
            or if the ranks are on several machines.
    """
    out, folder = config.out, config.out_folder
    if not is_remote(out):
        return None
    if world.local_size != world.size:
        raise UserError(
            f"out={out}: an address is for the ranks of one machine; for several give a folder "
            "that they share"
        )
    marker = folder.with_name(f"{folder.name}.fetched")
    launch = f"{world.attempt} {launch_name(world.launcher)}"
    if world.local_rank:
        while not (marker.exists() and marker.read_text(encoding="utf-8") == launch):
            time.sleep(0.1)
        return None
    marker.unlink(missing_ok=True)
    check_free(out)
    folder.mkdir(parents=True, exist_ok=True)
    sent = fetch_run(out, folder)
    marker.write_text(launch, encoding="utf-8")
    return sent


def is_held(folder: Path) -> bool:
    """Return True if another process has locked the run folder.

    False if this cannot be found out: the file system has no locks, or the lock file cannot be
    opened for writing.
    """
    with suppress(OSError), (folder / LOCK).open("r+", encoding="utf-8") as lock:
        try:
            _lock(lock)
        except OSError as error:
            return error.errno in _HELD
    return False


def _lock(file: IO[str]) -> None:
    """Take a POSIX lock, which child processes that outlive a killed run do not hold."""
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_folder(lock: IO[str], path: Path, out: str) -> None:
    """Lock the folder; if SLURM has restarted this job, wait for its previous attempt to end.

    Raises UserError if another run has the lock.
    """
    touched, since = path.stat().st_mtime_ns, time.monotonic()
    while not _try_lock(lock, out):
        holder, job = _holder(path)
        restarted = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
        if not restarted or job != os.environ.get("SLURM_JOB_ID"):
            raise _refusal(out, holder)
        if path.stat().st_mtime_ns != touched:  # the previous attempt is alive, perhaps saving
            touched, since = path.stat().st_mtime_ns, time.monotonic()
        elif time.monotonic() - since > TAKE_OVER_S:
            if holder.endswith(f" on {socket.gethostname()}"):  # same kernel: the lock is valid
                raise _refusal(out, holder)
            # The file server may keep the lock of a dead node.
            print(f"out={out}: taken over; silent for {TAKE_OVER_S:.0f} s: {holder}", flush=True)
            break
        time.sleep(min(1.0, TAKE_OVER_S / 4))
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.write(f"job {os.environ.get('SLURM_JOB_ID', 'none')}\n")
    lock.flush()


def _try_lock(lock: IO[str], out: str) -> bool:
    """Return whether the lock was acquired; also True if the file system has no locks."""
    try:
        _lock(lock)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        print(f"out={out}: no locks there, so two runs in it are not noticed", flush=True)
    return True


def _holder(lock: Path) -> tuple[str, str]:
    """Return a description of the lock's holder, and its SLURM job."""
    first, _, second = lock.read_text(encoding="utf-8").strip().partition("\n")
    return first or "another process", second.removeprefix("job ")


def _refusal(out: str, holder: str) -> UserError:
    return UserError(
        f"out={out}: {holder} is training there; wait for it, stop it, or use another out="
    )


def _touch(path: Path, over: threading.Event) -> None:
    while not over.wait(TOUCH_S):
        with suppress(OSError):
            os.utime(path)
