"""Stop on a signal: save at the next step and exit."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

from selftask.distributed.collectives import AnyFlag, is_primary
from selftask.distributed.world import STOP_SIGNALS, is_ignored
from selftask.hooks.base import ReleasedAtEnd, Task
from selftask.logs import get_logger
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("preemption")
@dataclass(eq=False, kw_only=True)
class StopOnSignal(ReleasedAtEnd):
    """Saves and exits after the step in which a signal arrives; a second signal exits at once.

    The signals are SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2. Later SIGHUPs are ignored, since
    closing a terminal sends several. A repeated signal is ignored within one second: a signal to a
    process group (``timeout``, ``systemctl stop``) reaches the ranks twice, directly and through
    their launcher. A SIGHUP that the process ignores from its start (nohup) stays ignored. The
    handler prints a message and sets a flag. With several ranks, each step starts a reduction of
    the flags and reads its result one step later, so that no rank waits and all ranks stop after
    the same step. The handler is installed when the hook is built, to catch a signal during the
    first evaluation too.

    The hook also saves and exits after step ``train.stop_at``, if that is set.
    """

    priority: ClassVar[int] = 95

    def __post_init__(self) -> None:
        self.received: str | None = None
        self.previous: dict[int, Any] = {}
        self.released = False
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and is_ignored(number):
                continue
            try:
                self.previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread: other code owns the signals
                log.info("signals are not handled: the task does not run in the main thread")
                break

    def on_start(self, task: Task) -> None:
        self.any_rank = AnyFlag()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if self.received is None:
            self.received, self.since = name, now
            _write_stderr(f"{name}: stopping after this step; a second one leaves at once, unsaved")
        elif number != signal.SIGHUP and (name != self.received or now > self.since + 1):
            self.release()
            _write_stderr(f"{name} again: leaving at once")
            raise KeyboardInterrupt(name)

    def on_step(self, task: Task) -> None:
        stop_at = task.config.train.stop_at
        if stop_at is not None and task.steps_done >= stop_at:  # equal on all ranks
            task.interrupted_by = f"train.stop_at={stop_at}"
        elif self.any_rank.poll(self.received is not None):
            task.interrupted_by = self.received or "a signal on another rank"

    def on_phase_end(self, task: Task) -> None:
        self.any_rank.drain()

    def release(self) -> None:
        """Restore the earlier signal handlers.

        Handlers installed later by another task are kept; that task restores the handlers from
        before both tasks.
        """
        self.released = True
        for number in [*self.previous]:
            if signal.getsignal(number) == self._receive:
                signal.signal(number, self._handler_before(number))
                del self.previous[number]

    def _handler_before(self, number: int) -> Any:
        handler = self.previous[number]
        hook = getattr(handler, "__self__", None)
        if isinstance(hook, StopOnSignal) and hook.released and number in hook.previous:
            return hook._handler_before(number)
        return handler


def _write_stderr(text: str) -> None:
    """On rank 0, write to stderr unbuffered: the signal may have interrupted a buffered write."""
    if is_primary():
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())
