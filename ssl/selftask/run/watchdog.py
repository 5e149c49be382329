"""Watchdog thread that detects failed, dead and hanging ranks.

Every rank writes a heartbeat once a second (less often with more than 256 ranks) to a board, a
key-value store hosted by rank 0, and reads whether another rank has failed. Rank 0 also reads all
heartbeats to detect dead ranks. If no rank makes progress for ``launch.hang_timeout_s``, rank 0
collects the stack of every rank and reports which rank is missing.

The main thread may be blocked in a collective. The watchdog therefore reports the failure and ends
the process itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from selftask.distributed.heartbeat import HEARTBEAT
from selftask.distributed.out_of_memory import ADVICE, OutOfMemoryKills
from selftask.errors import aligned
from selftask.logs import LOGGER
from selftask.logs.lines import flush_lines
from selftask.run.board import Board, BoardLost
from selftask.run.failure import Failure

EVERY_S = 1.0
SILENT_S = 60.0  # a rank on another machine without a heartbeat for this long is dead
LEAVE_S = 5.0  # time for the other ranks to read a failure

Beat = dict[str, Any]  # heartbeat of a rank: host, pid, count, doing, collectives, waits, step


class AwakeClock:
    """Clock that pauses while this process is stopped or suspended.

    A call returns the seconds since the creation of the clock.

    Args:
        max_gap_s: Largest time that is counted between two calls, in seconds.
    """

    def __init__(self, max_gap_s: float) -> None:
        self.max_gap_s = max_gap_s
        self._seconds, self._called = 0.0, time.monotonic()

    def __call__(self) -> float:
        before, self._called = self._called, time.monotonic()
        self._seconds += min(self._called - before, self.max_gap_s)
        return self._seconds


class Watch:
    """Watchdog of one rank. Every rank must create one; the thread then starts.

    Args:
        rank: This rank.
        size: Number of ranks.
        timeout_s: Time without progress on any rank after which the run fails, in seconds.
        report: Called in the thread, at most once, with the failure that ends the run. The process
            then exits with code 1.
    """

    def __init__(
        self, rank: int, size: int, *, timeout_s: float, report: Callable[[Failure], None]
    ) -> None:
        self.rank, self.size, self.timeout_s, self.report = rank, size, timeout_s, report
        self.board = Board(rank) if size > 1 else None
        if self.board is not None:
            self.board.limit_s = timeout_s if self.board.is_here else min(timeout_s, SILENT_S)
            # Immediately, since a rank may die before the first heartbeat of its thread.
            _quietly(self._write_heartbeat)
        self._every_s = max(EVERY_S, size / 256)  # rank 0 reads every rank's heartbeat
        self._now = AwakeClock(2 * self._every_s)
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._kills = OutOfMemoryKills()
        self._reporting = threading.Lock()
        self._moved: dict[int, tuple[int, float]] = {}  # rank -> count, time of last change
        self._heard: dict[int, tuple[Beat, float]] = {}  # rank -> heartbeat, time of last change
        self._thread = threading.Thread(target=self._run, name="selftask watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching at the end of the run; rank 0, which hosts the board, leaves last."""
        board = self._leave_watch()
        if board is None:
            return
        _quietly(lambda: board.set(f"left/{self.rank}", "1"))
        if self.rank == 0:
            self._await(lambda rank: board.has(f"left/{rank}"), range(1, self.size))

    def end(self) -> None:
        """End the thread without notifying other ranks, which detect the end of this process.

        A script or notebook may continue after its run, and would be reported as a hanging run.
        """
        self._over.set()
        self._thread.join(timeout=LEAVE_S)
        if self.board is not None:
            self.board.close()

    def _leave_watch(self) -> Board | None:
        """End the thread; return the board, with a time limit of ``LEAVE_S``, or None."""
        self._over.set()
        if self.board is not None:
            self.board.limit_s = LEAVE_S
        self._thread.join(timeout=LEAVE_S)
        return self.board

    def _await(self, done: Callable[[int], Any], ranks: Iterable[int]) -> None:
        """Wait until ``done`` is true of all ranks, for at most ``LEAVE_S``."""
        deadline = time.monotonic() + LEAVE_S
        for rank in ranks:
            while time.monotonic() < deadline and not _quietly(lambda: done(rank), default=True):  # noqa: B023
                time.sleep(0.05)

    # -- the main thread failed ---------------------------------------------------------------

    def cause(self, error: Failure, *, of_connection: bool) -> Failure:
        """Announce a failure of the main thread; return the original failure of the run.

        A broken connection usually means that another rank failed. In that case, wait for its
        report or its death.

        Args:
            error: Failure of this rank.
            of_connection: True if ``error`` is a broken connection.
        """
        if not self._reporting.acquire(blocking=False):
            time.sleep(4 * LEAVE_S)  # the watchdog thread is ending the process
        if self._leave_watch() is None:
            return error
        if of_connection:
            error = self._failure_of_others() or error
        first = self._announce(error)
        self._let_others_leave()
        return first

    def _failure_of_others(self) -> Failure | None:
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            try:
                failure, gone = self._announced(), None
                if self.rank == 0:
                    self._read_heartbeats()  # a rank may have died before its first was read
                    gone = self._gone(silent_s=LEAVE_S / 2)
            except BoardLost as lost:
                return self._rank0_is_gone(lost)
            if failure or gone:
                return failure or gone
            time.sleep(0.2)
        return None

    def _announce(self, failure: Failure) -> Failure:
        """Write the failure to the board unless it already has one; return the board's failure."""
        assert self.board is not None
        try:
            return Failure.from_json(self.board.set_once("failed", failure.to_json()))
        except BoardLost:
            failure.rank0_hears = False
            return failure

    def _announced(self) -> Failure | None:
        assert self.board is not None
        return Failure.from_json(self.board.get("failed")) if self.board.has("failed") else None

    def _let_others_leave(self) -> None:
        """Wait until the failure is known: rank 0 waits for all ranks, the others for rank 0."""
        board = self.board
        assert board is not None
        _quietly(lambda: board.set(f"knows/{self.rank}", "1"))
        awaited = range(1, self.size) if self.rank == 0 else [0]
        self._await(lambda rank: self._is_dead(rank) or board.has(f"knows/{rank}"), awaited)

    def _is_dead(self, rank: int) -> bool:
        return _dead_here(self._heard.get(rank, ({}, 0.0))[0])

    # -- the watchdog thread --------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                failure = self._check()
            except BoardLost as lost:
                failure = self._rank0_is_gone(lost)
            except Exception:  # noqa: BLE001 - a watchdog bug must not end the run
                LOGGER.exception("the watch over the run has ended; the run continues without it")
                return
            if failure is None or self._over.is_set():
                continue
            if self._reporting.acquire(blocking=False):
                self._end(failure)

    def _end(self, failure: Failure) -> None:
        """Report and announce a failure, then end the process; the main thread may be blocked."""
        try:
            if self.board is not None:
                failure = self._announce(failure)
            self.report(failure)
            if self.board is not None:
                self._let_others_leave()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            flush_lines()
            os._exit(1)

    def _check(self) -> Failure | None:
        if self.board is None:
            self._record(self.rank, _own_beat())
            return self._stuck()
        failure = self._announced()
        if failure is not None:
            return failure
        self._write_heartbeat()
        if self.board.has("stacks") and not self.board.has(f"stack/{self.rank}"):
            self.board.set(f"stack/{self.rank}", self._stack())
        if self.rank:
            return None
        self._read_heartbeats()
        return self._gone(silent_s=SILENT_S) or self._stuck()

    def _write_heartbeat(self) -> None:
        assert self.board is not None
        self.board.set(f"heartbeat/{self.rank}", json.dumps(_own_beat()))

    def _read_heartbeats(self) -> None:
        assert self.board is not None
        for rank in range(self.size):
            if self.board.has(f"heartbeat/{rank}"):
                self._record(rank, json.loads(self.board.get(f"heartbeat/{rank}")))

    def _record(self, rank: int, beat: Beat) -> None:
        now = self._now()
        if self._heard.get(rank, ({}, 0.0))[0] != beat:
            self._heard[rank] = (beat, now)
        count = beat.get("count", -1)
        if self._moved.get(rank, (None, 0.0))[0] != count:
            self._moved[rank] = (count, now)

    def _gone(self, *, silent_s: float) -> Failure | None:
        """Return the failure of a rank that is dead or whose heartbeat stopped, or None."""
        for rank, (beat, heard) in self._heard.items():
            silent = self._now() - heard
            if rank == self.rank or self._has_left(rank):
                continue
            if _dead_here(beat):
                why, lost = self._cause_of_death()
                return Failure(rank, f"{_describe(rank, beat)} is dead: {why}", lost=lost)
            if not _is_here(beat) and silent > silent_s:
                message = f"{_describe(rank, beat)} has given no sign for {silent:.0f} s"
                return Failure(rank, message, lost=True)
        return None

    def _rank0_is_gone(self, gone: BoardLost) -> Failure:
        assert self.board is not None
        is_local = self.board.is_here
        who = _describe(0, {"pid": self.board.pid, "host": self.board.host})
        if gone.silent_s is not None:
            message = f"{who} has not answered for {gone.silent_s:.0f} s: stopped, or cut off"
            stack = f"stack of rank {self.rank}:\n{self._stack()}"
            return Failure(0, message, stack, lost=not is_local)
        why, lost = self._cause_of_death() if is_local else ("killed, or out of memory", True)
        return Failure(0, f"{who} is dead: {why}", lost=lost)

    def _cause_of_death(self) -> tuple[str, bool]:
        """Return why a local process died, and True unless it was killed for lack of memory."""
        memory = self._kills.explain()
        return (f"{memory}; {ADVICE}", False) if memory else ("killed from outside", True)

    def _stuck(self) -> Failure | None:
        """Return a failure if no rank has made progress for ``timeout_s``, or None.

        The cause is attributed to a rank that is not waiting in a collective, if there is one.
        """
        present = {r: s for r, (s, _) in self._heard.items() if not self._has_left(r)}
        if not present:
            return None
        still = self._now() - max(self._moved[rank][1] for rank in present)
        if still < self.timeout_s:
            return None
        waiting = [rank for rank, beat in present.items() if beat["waits"]]
        missing = [rank for rank in present if rank not in waiting] or list(present)
        guilty = min(missing, key=lambda rank: present[rank]["collectives"])
        last = present[guilty]
        others = f", and {len(waiting)} of {self.size} ranks wait for it" if waiting else ""
        message = (
            f"nothing has moved for {still:.0f} s (launch.hang_timeout_s={self.timeout_s:g}): "
            f"{_describe(guilty, last)} is at {last['doing']!r} in step {last['step'] + 1}"
            f"{others}"
        )
        return Failure(guilty, message, self._table(present))

    def _has_left(self, rank: int) -> bool:
        return bool(self.board is not None and self.board.has(f"left/{rank}"))

    def _table(self, beats: dict[int, Beat]) -> str:
        """Return a table of all ranks, followed by their stacks."""
        stacks = self._stacks()
        columns = ("host", "pid", "step", "collectives", "doing")
        ordered = sorted(beats.items())
        rows = [[str(rank), *(str(beat[name]) for name in columns)] for rank, beat in ordered]
        lines = aligned([["rank", *columns], *rows], right=(3, 4))
        for rank, _ in ordered:
            lines += [f"stack of rank {rank}:", stacks.get(rank, "  (no answer)")]
        return "\n".join(lines)

    def _stacks(self) -> dict[int, str]:
        stacks = {self.rank: self._stack()}
        if self.board is None:
            return stacks
        self.board.set("stacks", "wanted")
        deadline = time.monotonic() + 3 * EVERY_S
        while len(stacks) < self.size and time.monotonic() < deadline:
            for rank in range(self.size):
                if rank not in stacks and self.board.has(f"stack/{rank}"):
                    stacks[rank] = self.board.get(f"stack/{rank}")
            time.sleep(0.1)
        return stacks

    def _stack(self) -> str:
        """Return the stack of the main thread."""
        frame = sys._current_frames().get(self._main or 0)
        return "".join(traceback.format_stack(frame)[-8:]).rstrip() if frame else "  (gone)"


def _own_beat() -> Beat:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "count": HEARTBEAT.count,
        "doing": HEARTBEAT.doing,
        "collectives": HEARTBEAT.collectives,
        "waits": HEARTBEAT.waits,
        "step": HEARTBEAT.step,
        "time": time.time(),  # makes successive heartbeats differ
    }


def _describe(rank: int, beat: Beat) -> str:
    return f"rank {rank} (pid {beat['pid']} on {beat['host']})"


def _is_here(beat: Beat) -> bool:
    return bool(beat.get("host") == socket.gethostname())


def _dead_here(beat: Beat) -> bool:
    """Return True if the rank was a process of this machine and has ended."""
    if not _is_here(beat):
        return False
    try:
        with open(f"/proc/{beat['pid']}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: it ended during the read
        return os.path.isdir("/proc/self")


def _quietly(ask: Callable[[], Any], default: Any = None) -> Any:
    """Return the result of ``ask``, or ``default`` if the board is lost; the run ends anyway."""
    try:
        return ask()
    except BoardLost:
        return default
