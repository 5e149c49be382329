"""Replace files atomically, and remove temporary files of killed processes."""

from __future__ import annotations

import errno
import glob
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from selftask.distributed.local_process import is_running

_FULL = (errno.ENOSPC, errno.EDQUOT)
OLD_S = 3600.0  # age at which another machine's temporary file counts as abandoned


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path, whose file replaces ``path`` at exit.

    A reader never sees an incomplete file. Each thread has a temporary file of its own. After an
    error it is removed. Those of killed processes are removed the next time the file is written,
    but on another machine only after an hour.
    """
    writer = f"{socket.gethostname()}.{os.getpid()}-{threading.get_native_id()}"
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            error.filename = str(path)  # a failed write does not name its file
        raise
    _remove_abandoned(path)


def write_durably(path: Path, text: str) -> None:
    """Write a small text file atomically, and fsync it before it gets its name."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove_abandoned(path: Path) -> None:
    pattern = re.compile(re.escape(f".{path.name}.") + r"(.*)\.(\d+)(?:-\d+)?\.tmp")
    with suppress(OSError):  # another process may be cleaning up, too
        for name in glob.glob(glob.escape(str(path.with_name(f".{path.name}."))) + "*.tmp"):
            match = pattern.fullmatch(os.path.basename(name))
            if match is None:
                continue
            here = match[1] == socket.gethostname()
            is_old = time.time() - os.stat(name).st_mtime > OLD_S
            if is_old or (here and not is_running(int(match[2]))):
                os.unlink(name)
