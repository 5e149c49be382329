"""``status.json``: what became of a run, for people, schedulers and the same command again."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from selftask.config.schema import Config
from selftask.distributed.world import read_world
from selftask.logs import read_json, write_json


def _is_alive(status: dict[str, Any]) -> bool:
    """Return whether the process named in a status is running on this machine."""
    pid = status.get("pid")
    if status.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid != os.getpid()


class Status:
    """State, step and process of the run in ``out``."""

    def __init__(self, config: Config) -> None:
        self.path = config.out_folder / "status.json"
        self.config = config
        self.started, self.started_clock = time.time(), time.monotonic()

    def read(self) -> dict[str, Any]:
        """What it says; nothing where there is none."""
        return read_json(self.path)

    def failed_by_another(self) -> bool:
        """Return whether another rank has already recorded the end of this attempt."""
        status, attempt = self.read(), read_world().attempt
        return bool(attempt and status.get("attempt") == attempt and status["state"] == "failed")

    def close_lost(self) -> str | None:
        """Correct the status of a killed attempt; return the message for the log."""
        before = self.read()
        if before.get("state") != "running" or _is_alive(before):
            return None
        error = (
            f"process {before.get('pid')} on {before.get('host')} was killed without a word: "
            "SIGKILL (the kernel's when memory runs out: see dmesg), or the machine went down"
        )
        write_json(self.path, {**before, "state": "failed", "error": error})
        return error

    def says_finished(self) -> bool:
        """Whether this very run is complete: asking for more steps than it had goes on with it."""
        if self.config.resume.checkpoint == "never":
            return False
        status = self.read()
        return status.get("state") == "finished" and status.get("length") == self._length

    @property
    def _length(self) -> list[int | None]:
        return [self.config.train.epochs, self.config.train.max_steps]

    def write(self, state: str, **more: Any) -> None:
        """``running``, ``finished``, ``interrupted``, ``requeued`` or ``failed``."""
        content = {
            "state": state,
            "length": self._length,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": read_world().attempt,
            "started": self.started,
            "updated": time.time(),
            **more,
        }
        write_json(self.path, content)
