"""Launch several ranks on this machine and wait for them.

Each rank runs the same command. The parent process never imports torch. It forwards signals, waits
for the ranks, and reports how the run ended if the ranks could not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from selftask.checkpoint.mirror import upload_files
from selftask.config.schema import Config
from selftask.distributed.out_of_memory import ADVICE, OutOfMemoryKills
from selftask.distributed.world import LISTEN_FD, STOP_SIGNALS, is_ignored, read_world
from selftask.errors import UserError, describe_exit
from selftask.files.addresses import is_remote
from selftask.logs import announce
from selftask.logs.events import add_event
from selftask.logs.lines import add_line
from selftask.report.at_end import write_end_page
from selftask.run.run_folder import check_free
from selftask.run.status import Status

_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # see prctl(2)
_ENDED_WELL = ("finished", "interrupted", "requeued")
GRACE_S = 20.0  # after the first failure; the other ranks usually exit within seconds
UPLOAD_S = 600.0  # the same if ``out`` is an address, to which rank 0 may upload a checkpoint


def start(config: Config, command: list[str]) -> int:
    """Run ``launch.processes`` ranks, with up to ``launch.max_restarts`` restarts after failures.

    There is no restart after an error that the user must fix, or after a stop signal.

    Args:
        config: The config of the run.
        command: Command line of a rank.

    Returns:
        The exit code of the first rank that failed in the last attempt, as of ``shell_code``, or 0.

    Raises:
        UserError: If another process has locked the run folder.
    """
    check_free(config.out)
    status = Status(config)
    attempts = config.launch.max_restarts + 1
    earlier = _saved(config)
    for attempt in range(1, attempts + 1):
        before = status.read()  # possibly from an earlier command
        grace_s = UPLOAD_S if is_remote(config.out) else GRACE_S
        ranks = Ranks(command, config.launch.processes, grace_s=grace_s)
        code = ranks.wait()
        after = status.read()
        state = after.get("state") if after != before else None
        if code == 0 or ranks.stopped_by is not None or state in _ENDED_WELL:
            return code
        is_user_error = code == UserError.exit_code  # which a restart cannot fix
        # It is reported already, except on a restart, whose status is that of its start.
        is_reported = is_user_error and state is None and attempt == 1
        if state in (None, "running") and not is_reported:
            _report_for_ranks(status, ranks)
        again = not is_user_error and attempt < attempts
        if again:  # the ranks take seconds until they write it themselves
            status.write("running", world_size=config.launch.processes, restart=attempt)
        upload_files(
            config.out, config.out_folder, "*.txt", "events.jsonl", "errors/*", "status.json"
        )
        if not again:
            break
        announce(f"starting again from the newest checkpoint: restart {attempt} of {attempts - 1}")
        if config.resume.checkpoint != "auto" and _saved(config) - earlier:
            command = [*command, "resume=auto"]  # the given checkpoint was for the first attempt
    return code


def _saved(config: Config) -> set[tuple[Path, int]]:
    """Return the existing checkpoints with their modification times."""
    paths = (config.out_folder / "checkpoints").glob("step_*")
    return {(path, path.stat().st_mtime_ns) for path in paths}


class Children:
    """Child processes, to which stop signals of this process are passed on until ``end``."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.stopped_by: int | None = None  # the last stop signal
        heeded = [n for n in STOP_SIGNALS if n != signal.SIGHUP or not is_ignored(n)]
        self._previous = {number: signal.signal(number, self._forward_signal) for number in heeded}

    def start(
        self, command: list[str], environments: Sequence[dict[str, str] | None], **options: Any
    ) -> None:
        """Start a process of ``command`` in each environment; ``options`` are passed to Popen."""
        started = [
            # preexec_fn is safe: this process has no threads
            subprocess.Popen(command, env=environment, preexec_fn=end_with_parent(), **options)
            for environment in environments
        ]
        self.processes += started
        if self.stopped_by is not None:  # before all were started
            self._send(self.stopped_by, started)

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = number
        self._send(number, self.processes)

    def _send(self, number: int, processes: list[subprocess.Popen[bytes]]) -> None:
        if not is_from_terminal(number):  # which has sent it to the children as well
            for process in processes:
                process.send_signal(number)

    def end(self) -> None:
        """Kill the processes that still run, and handle signals as before."""
        self.kill()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


class Ranks(Children):
    """The processes of a run on this machine, started by the constructor.

    Args:
        command: Command line of a rank.
        count: Number of ranks.
        grace_s: Time for the other ranks to end after the first failure, in seconds.
    """

    def __init__(self, command: list[str], count: int, *, grace_s: float = GRACE_S) -> None:
        super().__init__()
        self.grace_s = grace_s
        self.first_failed: int | None = None
        self.kills = OutOfMemoryKills()
        with socket.create_server((_HOST, 0), backlog=count) as listening:
            shared = {
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": _HOST,
                "MASTER_PORT": str(listening.getsockname()[1]),
                "SELFTASK_LAUNCHER": "selftask",
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
                # By default torch prints a C++ stack for each connection that a dying rank breaks.
            }
            ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
            environments = [{**os.environ, **shared, **rank} for rank in ranks]
            # Rank 0 gets the open port: another process could take a free one until it listens.
            environments[0][LISTEN_FD] = str(listening.fileno())
            self.start(command, environments[:1], pass_fds=[listening.fileno()])
            self.start(command, environments[1:])

    def wait(self) -> int:
        """Wait for all ranks; kill those that are still running ``grace_s`` after a failure.

        Returns:
            The exit code of the first rank that failed, as of ``shell_code``, or 0.
        """
        deadline: float | None = None
        try:
            while any(process.poll() is None for process in self.processes):
                failed = [r for r, p in enumerate(self.processes) if p.poll() not in (None, 0)]
                if failed and self.first_failed is None:
                    self.first_failed = failed[0]
                    deadline = time.monotonic() + self.grace_s
                if deadline is not None and time.monotonic() > deadline:
                    self.kill()
                time.sleep(0.1)
        finally:
            self.end()
        codes = [process.returncode for process in self.processes]
        if self.first_failed is None:
            self.first_failed = next((rank for rank, code in enumerate(codes) if code), None)
        return shell_code(codes[self.first_failed or 0])

    def describe_failure(self) -> str:
        """Return how the first failed rank ended, with advice if memory ran out."""
        rank = self.first_failed or 0
        process = self.processes[rank]
        code = process.returncode
        memory = self.kills.explain() if code == -signal.SIGKILL else ""
        more = f"; {memory}; {ADVICE}" if memory else ""
        return f"rank {rank} (pid {process.pid}) {describe_exit(code)}{more}"


def _report_for_ranks(status: Status, ranks: Ranks) -> None:
    """Write the last log line, event and status of a run whose ranks could not write them."""
    message = ranks.describe_failure()
    status.path.parent.mkdir(parents=True, exist_ok=True)
    status.write("failed", rank=ranks.first_failed, error=message)
    line = f"RUN FAILED on rank {ranks.first_failed}: {message}"
    add_event(status.path.parent, "failure", line, rank=ranks.first_failed, error=message)
    if status.config.train.report:
        write_end_page(status.path.parent)
    add_line(status.path.parent, line)
    print(line, flush=True)


def starts_ranks(config: Config) -> bool:
    """Return True if this process has to start the ranks, False if it is a rank.

    Raises:
        UserError: If the launcher of this process started a different number of ranks than the
            config requests, and it requests several; or if several nodes are requested from a
            process without a launcher.
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
    """Return the command line of ``selftask train ARGV``, started like this process.

    ``-m`` is used only if needed, since it puts the current folder first on the module search path.
    """
    started = ["-m", "selftask"]
    if sys.argv[1:2] == ["train"]:
        started = sys.orig_argv[1 : 1 - len(sys.argv)]
    return [sys.executable, *started, "train", *argv]


def shell_code(returncode: int) -> int:
    """Return the exit code of a process as a shell reports it: 128 + N after signal N."""
    return 128 - returncode if returncode < 0 else returncode


def is_from_terminal(number: int) -> bool:
    """Return True for a SIGINT that the terminal has also sent to the child processes (Ctrl-C).

    It must not be forwarded, since a run exits without saving after a second signal. The result is
    False if this process is not in the foreground of its terminal, or has none.
    """
    if number != signal.SIGINT:
        return False
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False


def end_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn``: the kernel then sends SIGTERM to the child when this process dies.

    Otherwise the children of a killed parent would keep running unnoticed. The result is None
    except on Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return arrange
