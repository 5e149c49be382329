"""Reading of whole files with time limits and retries.

A path may not be a regular file, and its file system may not answer. A read that hangs in the
kernel cannot be canceled by a signal, and on a hard NFS mount it cannot be canceled at all.
Therefore a separate thread reads while the caller waits, and a thread that hangs is abandoned. One
thread per caller is kept for the next file: passing a file to a thread takes about 15 microseconds.

Each process also writes the path that it reads to memory shared with its parent process. The parent
can then report the file that killed a worker (``last_file``).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, TypeVar

from selftask.errors import BadImage, UserError
from selftask.files import addresses
from selftask.files.addresses import is_remote
from selftask.files.received import special_kind

T = TypeVar("T")

SAMPLE_BYTES = 4096  # of a file, at its start and in its middle
MAX_STUCK = 16  # hanging threads of a process, after which other reads fail
FIRST_PAUSE_S = 0.1  # pause before the first retry; each later pause is four times as long

TRANSIENT = frozenset(
    {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EREMOTEIO}
    | {errno.ENOTCONN, errno.ECONNRESET, errno.ESHUTDOWN, errno.EHOSTDOWN}
)  # errors of network file systems that may be temporary


@dataclass
class Policy:
    """Read settings of this process and its forked workers, from the config section ``data``."""

    timeout_s: float = 60.0  # 0: no limit
    retries: int = 2
    max_bytes: int = 1 << 30  # of one encoded image
    max_scans: int = 100  # of one JPEG
    max_pixels: int = 178_956_970  # of one image; Pillow's limit for decompression bombs


POLICY = Policy()


def set_policy(policy: Policy) -> None:
    """Set the process-wide read settings."""
    vars(POLICY).update(vars(policy))


def read_bytes(path: str) -> bytes:
    """Return the content of a regular file or a remote file; symbolic links are followed.

    Raises:
        BadImage: If it is not a regular file, has more than ``data.max_bytes`` bytes, cannot be
            read, or was not read in time.
    """
    now_reading(path)
    return with_retries(_read_remote if is_remote(path) else _read, path, path)


def read_sample(path: str) -> bytes | None:
    """Return bytes that identify the content of a local file; None for a remote file.

    Returns:
        The size of the file, its first bytes, and bytes from its middle, since different images may
        have the same header.

    Raises:
        BadImage: As in ``read_bytes``.
    """
    return None if is_remote(path) else with_retries(_read_sample, path, path)


def with_retries(read: Callable[[str], T], path: str, name: str) -> T:
    """Return ``read(path)``, called with a time limit and retried after temporary errors.

    The limit and the number of retries, with growing pauses, are those of ``POLICY``. For an
    address, all errors count as temporary except a missing file or missing permission.

    Args:
        read: Function to call.
        path: Its argument, a path or an address.
        name: Name of the image for BadImage.

    Raises:
        BadImage: If all attempts failed, or one failed with an error that is not temporary.
            UserError and MemoryError are raised unchanged.
    """
    may_pass = _may_pass_remote if is_remote(path) else is_transient
    for attempt in range(POLICY.retries + 1):
        if attempt:
            time.sleep(FIRST_PAUSE_S * 4 ** (attempt - 1))
        try:
            return in_time(read, path, POLICY.timeout_s)
        except (MemoryError, UserError):
            raise
        except Exception as error:  # noqa: BLE001 - file systems have their own errors
            problem = error
            if not may_pass(error):
                break
    reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
    tried = f" (tried {attempt + 1} times)" if attempt else ""
    failed = may_pass(problem) or getattr(problem, "errno", None) == errno.EDEADLK
    raise BadImage(name, f"{reason.lower()}{tried}", storage_failed=failed) from problem


def is_transient(error: Exception) -> bool:
    """Return whether an error may be temporary: a timeout, or an errno in ``TRANSIENT``."""
    return isinstance(error, OSError) and (
        isinstance(error, TimeoutError) or error.errno in TRANSIENT
    )


def _may_pass_remote(error: Exception) -> bool:
    """Return False if a store reports that a file does not exist or may not be read, else True."""
    return not isinstance(error, FileNotFoundError | PermissionError)


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading; raises OSError if it is not one or is missing or too large.

    ``data.max_bytes`` is the limit of its size.
    """
    return os.fdopen(_open(path)[0], "rb")


def _open(path: str) -> tuple[int, int]:
    """Open a regular file and return handle and size. A pipe is rejected, as it would block."""
    status = os.stat(path)
    if kind := special_kind(status.st_mode):
        raise OSError(errno.EINVAL, f"{kind}, not a file")
    check_size(status.st_size)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), status.st_size


def check_size(num_bytes: int) -> None:
    """Raise OSError if an encoded image has more than ``data.max_bytes`` bytes."""
    if num_bytes > POLICY.max_bytes:
        raise OSError(
            errno.EFBIG, f"{num_bytes} bytes, more than data.max_bytes={POLICY.max_bytes}"
        )


def _read_remote(address: str) -> bytes:
    with addresses.open_read(address) as file:
        content = file.read(POLICY.max_bytes + 1)
    check_size(len(content))
    return content


def _read(path: str) -> bytes:
    handle, size = _open(path)
    try:
        content = os.read(handle, size + 1)
        if len(content) == size:
            return content
        parts = [content]  # the file has changed its size, or the kernel returns it in pieces
        while parts[-1]:
            parts.append(os.read(handle, 1 << 20))
            check_size(sum(map(len, parts)))
        return b"".join(parts)
    finally:
        os.close(handle)


def _read_sample(path: str) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        pieces = [os.pread(file.fileno(), SAMPLE_BYTES, start) for start in (0, size // 2)]
    return b"%d\0" % size + b"".join(pieces)


class _ReadingThread:
    """A thread that runs one call at a time for a waiting caller."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[Callable[[str], Any], str] | None] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self.thread.start()

    def give_up(self) -> None:
        """Abandon the thread; it ends when its read returns, if it ever does."""
        self.jobs.put(None)
        _STUCK.append(self.thread)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            function, path = job
            try:
                self.answers.put((function(path), None))
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                self.answers.put((None, error))


_IDLE: list[_ReadingThread] = []
_STUCK: list[threading.Thread] = []


def in_time(function: Callable[[str], T], path: str, timeout_s: float) -> T:
    """Return ``function(path)``, called with a time limit; its exceptions are raised unchanged.

    Args:
        function: Function of a path.
        path: Its argument.
        timeout_s: Time limit in seconds; 0: no limit.

    Raises:
        TimeoutError: If the call takes longer than the limit.
        OSError: If a new thread is needed while ``MAX_STUCK`` threads hang.
    """
    if timeout_s <= 0:
        return function(path)
    try:
        reader = _IDLE.pop()
    except IndexError:
        reader = _new_thread()
    reader.jobs.put((function, path))
    try:
        answer, error = reader.answers.get(timeout=timeout_s)
    except Empty:
        reader.give_up()
        late = f"no answer from the file system within {timeout_s:g} s"
        raise TimeoutError(late) from None
    except BaseException:  # an interrupt: the thread may still be running
        reader.give_up()
        raise
    _IDLE.append(reader)
    if error is not None:
        raise error
    return answer


def _new_thread() -> _ReadingThread:
    _STUCK[:] = [thread for thread in _STUCK if thread.is_alive()]
    if len(_STUCK) >= MAX_STUCK:
        raise OSError(errno.EDEADLK, f"{len(_STUCK)} reads of other files have not come back yet")
    return _ReadingThread()


def _end_idle_threads() -> None:
    """End idle threads before a fork; Python warns if threads are running."""
    while _IDLE:
        reader = _IDLE.pop()
        reader.jobs.put(None)
        reader.thread.join(timeout=1.0)


def _forget_threads() -> None:
    """Forget the threads of the parent, which do not exist in a forked process."""
    _IDLE.clear()
    _STUCK.clear()


os.register_at_fork(before=_end_idle_threads, after_in_child=_forget_threads)


# Slots of 4096 bytes: process id, length, path. Unused slots take no memory.
_NUM_SLOTS, _SLOT = 1024, 4096
_SLOTS = mmap.mmap(-1, _NUM_SLOTS * _SLOT)  # anonymous and shared with forked processes


def now_reading(path: str) -> None:
    """Record the file that this process reads or decodes: a path, or a name in an archive."""
    name = os.fsencode(path)[-(_SLOT - 12) :]
    pid = os.getpid()
    start = pid % _NUM_SLOTS * _SLOT
    head = pid.to_bytes(8, "little") + len(name).to_bytes(4, "little")
    _SLOTS[start : start + 12 + len(name)] = head + name


def last_file(pid: int) -> str | None:
    """Return the last file that a forked process read, also after its death; None if unknown."""
    start = pid % _NUM_SLOTS * _SLOT
    if int.from_bytes(_SLOTS[start : start + 8], "little") != pid:
        return None
    length = int.from_bytes(_SLOTS[start + 8 : start + 12], "little")
    return os.fsdecode(_SLOTS[start + 12 : start + 12 + length])
