"""Several ranks on this machine: the same command once per rank, watched until all have left.

The parent never imports torch. It hands signals on, waits for the ranks, and says how the run ended
where they no longer could.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from selftask.checkpoint.mirror import upload_files
from selftask.config.schema import Config
from selftask.distributed.out_of_memory import ADVICE, OutOfMemoryKills
from selftask.distributed.world import STOP_SIGNALS, is_ignored, read_world
from selftask.errors import UserError, describe_exit
from selftask.logs import add_line
from selftask.run.run_folder import check_free
from selftask.run.status import Status

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
GRACE_S = 20.0  # after the first failure: the ranks tell each other and leave within seconds


def start(config: Config, command: list[str]) -> int:
    """Run ``command`` as ``launch.processes`` ranks; again after a failure, as the config allows.

    Returns the exit code of the first rank that failed, or of rank 0.
    """
    check_free(config.out)
    status = Status(config)
    attempts = config.launch.max_restarts + 1
    earlier = _saved(config)
    for attempt in range(1, attempts + 1):
        before = status.read()  # may be of an earlier run
        ranks = Ranks(command, config.launch.processes)
        code = ranks.wait()
        after = status.read()
        state = after.get("state") if after != before else None
        if code == 0 or ranks.asked_to_stop or state in _ENDED_WELL:
            return code
        mistake = state is None and code == 2  # of the user, who has been told
        if state in (None, "running") and not mistake:
            _tell_what_ranks_could_not(status, ranks)
        upload_files(config.out, config.out_folder, "*.txt", "errors/*", "status.json")
        if code == 2 or attempt == attempts:  # what the user has to put right stays wrong
            break
        print(f"starting again from the newest checkpoint: restart {attempt} of {attempts - 1}")
        if config.resume.checkpoint != "auto" and _saved(config) - earlier:
            command = [*command, "resume=auto"]  # another one was for the first attempt
    return code


def _saved(config: Config) -> set[tuple[Path, int]]:
    """Return the existing checkpoints with their modification times."""
    found = (config.out_folder / "checkpoints").glob("step_*")
    return {(path, path.stat().st_mtime_ns) for path in found}


_ENDED_WELL = ("finished", "interrupted", "requeued")


class Ranks:
    """The processes of a run on this machine."""

    def __init__(self, command: list[str], count: int) -> None:
        self.asked_to_stop = False
        self.first_failed: int | None = None
        self.kills = OutOfMemoryKills()
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "SELFTASK_LAUNCHER": "selftask",
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            # else torch shows the C++ stack of each connection that a dying rank breaks
        }
        heeded = [n for n in STOP_SIGNALS if n != signal.SIGHUP or not is_ignored(n)]
        self.previous = {number: signal.signal(number, self._hand_on) for number in heeded}
        self.processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                preexec_fn=_stopped_with(os.getpid()),  # there is no thread here that it could meet
            )
            for rank in range(count)
        ]

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop = True
        if number == signal.SIGINT and os.isatty(0):
            return  # the terminal has sent it to the ranks itself
        for process in getattr(self, "processes", []):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def wait(self) -> int:
        """Until all have left; those that do not leave after a failure are killed."""
        deadline: float | None = None
        try:
            while any(process.poll() is None for process in self.processes):
                failed = [r for r, p in enumerate(self.processes) if p.poll() not in (None, 0)]
                if failed and self.first_failed is None:
                    self.first_failed = failed[0]
                    deadline = time.monotonic() + GRACE_S
                if deadline is not None and time.monotonic() > deadline:
                    self._kill()
                time.sleep(0.1)
        finally:
            self._kill()
            for number, handler in self.previous.items():
                signal.signal(number, handler)
        codes = [process.returncode for process in self.processes]
        if self.first_failed is None:
            self.first_failed = next((rank for rank, code in enumerate(codes) if code), None)
        code = codes[self.first_failed or 0]
        return 128 - code if code < 0 else code

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def describe_failure(self) -> str:
        """What the first rank that failed died of."""
        rank = self.first_failed or 0
        process = self.processes[rank]
        code = process.returncode
        memory = self.kills.explain() if code == -signal.SIGKILL else ""
        more = f"; {memory}; {ADVICE}" if memory else ""
        return f"rank {rank} (pid {process.pid}) {describe_exit(code)}{more}"


def _tell_what_ranks_could_not(status: Status, ranks: Ranks) -> None:
    """The last line and the status of a run whose first rank died before it could write them."""
    message = ranks.describe_failure()
    status.path.parent.mkdir(parents=True, exist_ok=True)
    status.write("failed", rank=ranks.first_failed, error=message)
    line = f"RUN FAILED on rank {ranks.first_failed}: {message}"
    add_line(status.path.parent, line)
    print(line, flush=True)


def starts_ranks(config: Config) -> bool:
    """Return whether this process starts the ranks instead of being one.

    Raises UserError if the launcher around this process has started another number of ranks than
    the config asks for.
    """
    world, asked = read_world(), config.launch.world_size
    alone = asked == 1 and not config.launch.max_restarts
    if world.launcher != "python" or alone:
        if asked not in (1, world.size):
            raise UserError(
                f"launch.nodes x launch.processes is {asked}, but {world.launcher} has started "
                f"{world.size} processes; leave launch out, or make it {world.size}"
            )
        return False
    if config.launch.nodes > 1:
        raise UserError(
            f"launch.nodes={config.launch.nodes}: this command starts processes on one machine; "
            "use `selftask submit`, srun, or torchrun on each node"
        )
    return True


def own_command(argv: list[str]) -> list[str]:
    """Return the command line of a rank: this command, started in the same way.

    ``-m`` would look for every module in the current folder first, which the installed script
    does not.
    """
    if sys.argv[1:] == ["train", *argv]:
        return [sys.executable, *sys.orig_argv[1:]]
    return [sys.executable, "-m", "selftask", "train", *argv]


def _stopped_with(parent: int) -> Callable[[], None] | None:
    """What a rank does before anything else: have the kernel send it SIGTERM when its parent dies.

    A parent that is killed can hand nothing on, and its ranks would train on, seen by nobody.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return arrange


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
