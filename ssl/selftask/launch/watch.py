"""Watches a run from a thread of its own: who failed, who is gone, and what hangs.

Every rank writes a sign of life a second to a board (a key-value store that rank 0 keeps) and reads
whether another has failed. Rank 0 also reads all signs: it knows who has died and, when none has
moved for ``launch.timeout_s``, asks every rank for its stack and tells who was missing where.

The main thread may be deep in a collective that never ends, so whoever finds the cause here reports
it and ends the process from here.
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
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from selftask.logs import LOGGER
from selftask.memory import ADVICE, OutOfMemoryKills
from selftask.pulse import PULSE

EVERY_S = 1.0
SILENT_S = 60.0  # a rank on another machine without a sign for so long is gone
LEAVE_S = 5.0  # how long the others get to hear of a failure

Sign = dict[str, Any]  # what a rank writes: host, pid, count, doing, collectives, waits, step


class Failure(Exception):
    """What ended the run, as the rank it happened on tells it."""

    def __init__(self, rank: int, message: str, details: str = "") -> None:
        super().__init__(message)
        self.rank, self.message, self.details = rank, message, details

    def to_json(self) -> str:
        return json.dumps({"rank": self.rank, "message": self.message, "details": self.details})


class Rank0IsGone(Failure):
    """The board cannot be reached any more: rank 0 died without a word, and others must speak."""

    def __init__(self, why: str) -> None:
        super().__init__(0, f"rank 0 is gone: {why}; the others cannot go on")


class Watch:
    """One thread of each rank; ``report`` is called once at most, with what ended the run."""

    def __init__(
        self, rank: int, size: int, *, timeout_s: float, report: Callable[[Failure], None]
    ) -> None:
        self.rank, self.size, self.timeout_s, self.report = rank, size, timeout_s, report
        self.board: Any = None
        self._host_of_rank0 = ""
        if size > 1:
            self.board, self._host_of_rank0 = _open_board(rank, size)
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._kills = OutOfMemoryKills()
        self._reporting = threading.Lock()
        self._moved: dict[int, tuple[int, float]] = {}  # rank -> its count, when it last changed
        self._heard: dict[int, tuple[Sign, float]] = {}  # rank -> its sign, when it last changed
        self._thread = threading.Thread(target=self._run, name="selftask watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The run is over on this rank: nobody is to miss it. Rank 0, with the board, goes last."""
        self._over.set()
        self._thread.join()
        board = self.board
        if board is None:
            return
        _quietly(lambda: board.set(f"left/{self.rank}", "1"))
        if self.rank == 0:
            self._await(lambda rank: board.check([f"left/{rank}"]), range(1, self.size))

    def _await(self, done: Callable[[int], Any], ranks: Iterable[int]) -> None:
        """Until that is so of all ranks, a few seconds at most."""
        deadline = time.monotonic() + LEAVE_S
        for rank in ranks:
            while time.monotonic() < deadline and not _quietly(lambda: done(rank), default=True):  # noqa: B023
                time.sleep(0.05)

    # -- the main thread failed ---------------------------------------------------------------

    def cause(self, error: Failure, *, of_connection: bool) -> Failure:
        """Why the run really ends, now that the main thread of this rank has raised ``error``.

        Tells the others. A broken connection is what a failure elsewhere looks like from here: it
        waits for the word of that rank, or for the news that it is gone.
        """
        if not self._reporting.acquire(blocking=False):
            time.sleep(4 * LEAVE_S)  # the watch is at it, and ends the process
        self._over.set()
        self._thread.join(timeout=LEAVE_S)
        if self.board is None:
            return error
        if of_connection:
            error = self._word_of_others() or error
        first: Failure = _quietly(lambda: self._announce(error)) or error
        self._let_others_leave()
        return first

    def _word_of_others(self) -> Failure | None:
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            try:
                told = self._told()
                gone = self._gone(silent_s=LEAVE_S / 2) if self.rank == 0 else None
            except dist.DistError:
                return self._rank0_is_gone()
            if told or gone:
                return told or gone
            time.sleep(0.2)
        return None

    def _announce(self, failure: Failure) -> Failure:
        """Put it on the board unless one is there; the one that is there."""
        assert self.board is not None
        return _failure(self.board.compare_set("failed", "", failure.to_json()).decode())

    def _told(self) -> Failure | None:
        assert self.board is not None
        if not self.board.check(["failed"]):
            return None
        return _failure(self.board.get("failed").decode())

    def _let_others_leave(self) -> None:
        """Rank 0 keeps the board, so it goes last; the others wait until rank 0 has read."""
        board = self.board
        assert board is not None
        _quietly(lambda: board.set(f"knows/{self.rank}", "1"))
        awaited = range(1, self.size) if self.rank == 0 else [0]
        self._await(lambda rank: self._is_dead(rank) or board.check([f"knows/{rank}"]), awaited)

    def _is_dead(self, rank: int) -> bool:
        return _dead_here(self._heard.get(rank, ({}, 0.0))[0])

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        every_s = max(EVERY_S, self.size / 256)  # rank 0 reads all signs
        while not self._over.wait(every_s):
            try:
                failure = self._look()
            except dist.DistError:
                failure = self._rank0_is_gone()
            except Exception:  # noqa: BLE001 - a bug of the watch must not cost the run
                LOGGER.exception("the watch over the run has ended; the run goes on without it")
                return
            if failure is not None and self._reporting.acquire(blocking=False):
                self._end(failure)

    def _end(self, failure: Failure) -> None:
        """Report, let the others know, leave: the main thread may never come back."""
        try:
            if self.board is not None:
                failure = _quietly(lambda: self._announce(failure)) or failure
            self.report(failure)
            if self.board is not None:
                self._let_others_leave()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)

    def _look(self) -> Failure | None:
        mine = _sign()
        if self.board is None:
            self._note(self.rank, mine)
            return self._stuck()
        told = self._told()
        if told is not None:
            return told
        self.board.set(f"sign/{self.rank}", json.dumps(mine))
        if self.board.check(["stacks"]) and not self.board.check([f"stack/{self.rank}"]):
            self.board.set(f"stack/{self.rank}", self._stack())
        if self.rank:
            return None
        for rank in range(self.size):
            if self.board.check([f"sign/{rank}"]):
                self._note(rank, json.loads(self.board.get(f"sign/{rank}")))
        return self._gone(silent_s=SILENT_S) or self._stuck()

    def _note(self, rank: int, sign: Sign) -> None:
        now = time.monotonic()
        if self._heard.get(rank, ({}, 0.0))[0] != sign:
            self._heard[rank] = (sign, now)
        count = sign.get("count", -1)
        if self._moved.get(rank, (None, 0.0))[0] != count:
            self._moved[rank] = (count, now)

    def _gone(self, *, silent_s: float) -> Failure | None:
        """A rank that has died without a word: its process is not here, or nobody hears of it."""
        for rank, (sign, heard) in self._heard.items():
            silent = time.monotonic() - heard
            if rank == self.rank or self._has_left(rank):
                continue
            if _dead_here(sign):
                return Failure(rank, f"{_who(rank, sign)} is dead: {self._why()}")
            if not _is_here(sign) and silent > silent_s:
                return Failure(rank, f"{_who(rank, sign)} has given no sign for {silent:.0f} s")
        return None

    def _rank0_is_gone(self) -> Rank0IsGone:
        here = self._host_of_rank0 == socket.gethostname()
        return Rank0IsGone(self._why() if here else "killed, or out of memory")

    def _why(self) -> str:
        memory = self._kills.explain()
        return f"{memory}; {ADVICE}" if memory else "killed from outside"

    def _stuck(self) -> Failure | None:
        """No rank has moved for too long. Who does not wait for the others keeps them waiting."""
        present = {r: s for r, (s, _) in self._heard.items() if not self._has_left(r)}
        if not present:
            return None
        still = time.monotonic() - max(self._moved[rank][1] for rank in present)
        if still < self.timeout_s:
            return None
        waiting = [rank for rank, sign in present.items() if sign["waits"]]
        missing = [rank for rank in present if rank not in waiting] or list(present)
        guilty = min(missing, key=lambda rank: present[rank]["collectives"])
        doing = present[guilty]["doing"]
        others = f", and {len(waiting)} of {self.size} ranks wait for it" if waiting else ""
        message = (
            f"nothing has moved for {still:.0f} s (launch.timeout_s={self.timeout_s:g}): "
            f"{_who(guilty, present[guilty])} is at {doing!r} in step {present[guilty]['step'] + 1}"
            f"{others}"
        )
        return Failure(guilty, message, self._table(present))

    def _has_left(self, rank: int) -> bool:
        return bool(self.board is not None and self.board.check([f"left/{rank}"]))

    def _table(self, signs: dict[int, Sign]) -> str:
        """One line and the stack of each rank."""
        stacks = self._stacks()
        lines = [f"{'rank':<6}{'host':<20}{'pid':<9}{'step':>8}{'collectives':>13}  doing"]
        for rank, sign in sorted(signs.items()):
            lines.append(
                f"{rank:<6}{sign['host']:<20}{sign['pid']:<9}{sign['step']:>8}"
                f"{sign['collectives']:>13}  {sign['doing']}"
            )
        for rank in sorted(signs):
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
                if rank not in stacks and self.board.check([f"stack/{rank}"]):
                    stacks[rank] = self.board.get(f"stack/{rank}").decode()
            time.sleep(0.1)
        return stacks

    def _stack(self) -> str:
        """Where the main thread is."""
        frame = sys._current_frames().get(self._main or 0)
        return "".join(traceback.format_stack(frame)[-8:]).rstrip() if frame else "  (gone)"


def _open_board(rank: int, size: int) -> tuple[Any, str]:
    """A store of our own, and its host: the process group's serves one at a time, and blocks."""
    kept = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False) if rank == 0 else None
    place: list[Any] = [None if kept is None else (socket.gethostname(), kept.port)]
    dist.broadcast_object_list(place, src=0)
    host, port = place[0]
    if kept is not None:
        return kept, host
    address = os.environ.get("MASTER_ADDR", host)
    board = TCPStore(address, port, None, False, timedelta(seconds=30), wait_for_workers=False)
    return board, host


def _sign() -> Sign:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "count": PULSE.count,
        "doing": PULSE.doing,
        "collectives": PULSE.collectives,
        "waits": PULSE.waits,
        "step": PULSE.step,
        "time": time.time(),  # makes two signs differ as long as somebody writes them
    }


def _failure(text: str) -> Failure:
    told = json.loads(text)
    return Failure(told["rank"], told["message"], told["details"])


def _who(rank: int, sign: Sign) -> str:
    return f"rank {rank} (pid {sign['pid']} on {sign['host']})"


def _is_here(sign: Sign) -> bool:
    return bool(sign.get("host") == socket.gethostname())


def _dead_here(sign: Sign) -> bool:
    """Whether that rank was a process of this machine, and is no more."""
    if not _is_here(sign):
        return False
    try:
        with open(f"/proc/{sign['pid']}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it went while it was read
        return os.path.isdir("/proc/self")


def _quietly(ask: Callable[[], Any], default: Any = None) -> Any:
    """What the board answers, ``default`` where it is gone with rank 0: the run ends anyway."""
    try:
        return ask()
    except dist.DistError:
        return default
