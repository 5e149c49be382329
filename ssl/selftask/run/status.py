"""``status.json``: the run state, for users, schedulers and a resume."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

from selftask.config.schema import Config
from selftask.distributed.local_process import is_running
from selftask.distributed.world import read_world
from selftask.errors import UserError
from selftask.logs import read_json, write_json


def _is_alive(status: dict[str, Any]) -> bool:
    """Return True if the process named in a status runs on this machine and is not this one."""
    pid = status.get("pid")
    if status.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return is_running(pid) and pid != os.getpid()


class Status:
    """Reader and writer of the ``status.json`` of a run."""

    def __init__(self, config: Config) -> None:
        self.path = config.out_folder / "status.json"
        self.config = config
        self.started, self.started_clock = time.time(), time.monotonic()
        self._is_written = False

    def read(self) -> dict[str, Any]:
        """Return the content, or an empty dict if the file is missing or damaged."""
        return read_json(self.path)

    def _read_if_possible(self) -> dict[str, Any]:
        """Read the status; a failing file system must not hide how the run ended."""
        with suppress(OSError, UserError):
            return self.read()
        return {}

    def failed_by_another(self) -> bool:
        """Return True if a rank has already recorded the failure of this attempt.

        Older records are of an earlier run in the same SLURM job. Always False if the attempt has
        no identifier (``World.attempt``).
        """
        status, attempt = self._read_if_possible(), read_world().attempt
        is_failed = status.get("attempt") == attempt and status.get("state") == "failed"
        return bool(attempt and is_failed and status.get("updated", 0.0) >= self.started)

    def is_replaced(self) -> bool:
        """Return True if another run has begun in the folder since this one wrote the status."""
        content = self._read_if_possible()
        return self._is_written and bool(content) and not content.items() >= self._process.items()

    def close_lost(self) -> str | None:
        """Set the state of a killed attempt to failed; return a message for the log, or None."""
        before = self.read()
        if before.get("state") != "running" or _is_alive(before):
            return None
        error = (
            f"process {before.get('pid')} on {before.get('host')} was killed without a word: "
            "SIGKILL (the kernel's when memory runs out: see dmesg), or the machine went down"
        )
        write_json(self.path, {**before, "state": "failed", "error": error})
        return error

    def is_finished(self) -> bool:
        """Return True if the run is complete at the requested length; False if resume=never."""
        if self.config.resume.checkpoint == "never":
            return False
        status = self.read()
        return status.get("state") == "finished" and status.get("length") == self._length

    @property
    def _process(self) -> dict[str, Any]:
        return {"host": socket.gethostname(), "pid": os.getpid(), "started": self.started}

    @property
    def _length(self) -> list[float | None]:
        return [self.config.train.epochs, self.config.train.max_steps]

    def write(self, state: str, **more: Any) -> None:
        """Replace the status.

        Args:
            state: ``running``, ``finished``, ``interrupted``, ``requeued`` or ``failed``.
            **more: Other entries of the file.
        """
        content = {
            "state": state,
            "length": self._length,
            **self._process,
            "attempt": read_world().attempt,
            "updated": time.time(),
            **more,
        }
        write_json(self.path, content)
        self._is_written = True

    def add(self, **more: Any) -> None:
        """Add entries to the status of a running run, unless they are already there."""
        before = self.read()
        is_ours = before.get("state") == "running" and not self.is_replaced()
        if is_ours and before != {**before, **more}:
            write_json(self.path, {**before, "updated": time.time(), **more})
