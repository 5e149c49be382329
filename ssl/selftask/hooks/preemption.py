"""A signal asks the run to stop; it saves at the next step and leaves."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from selftask.collectives import all_reduce_sum, world_size
from selftask.hooks.base import Hook
from selftask.logs import get_logger
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task

log = get_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


@register_hook("preemption")
@dataclass(eq=False, kw_only=True)
class StopOnSignal(Hook):
    """SIGTERM, SIGINT and SIGUSR2 save at the next step; a second one ends the process at once.

    The handler only sets a flag; all ranks agree on it between two steps. It is there from the
    moment the hook is built, so that a signal during the first evaluation is not lost.
    """

    priority: ClassVar[int] = 95

    def __post_init__(self) -> None:
        self.received: str | None = None
        self.previous: dict[int, Any] = {}
        for number in _SIGNALS:
            try:
                self.previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread: somebody else owns the signals
                log.info("signals are not handled: the task does not run in the main thread")
                break

    def on_start(self, task: Task) -> None:
        self.alone = world_size() == 1

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._restore()
            signal.raise_signal(number)
        self.received = signal.Signals(number).name

    def on_step(self, task: Task) -> None:
        stop_at = task.config.train.stop_at
        if stop_at is not None and task.iteration >= stop_at:
            self.received = f"train.stop_at={stop_at}"
        if self.received is None and self.alone:
            return
        if _on_any_rank(self.received is not None, task.device):
            task.interrupted_by = self.received or "a signal on another rank"

    def on_end(self, task: Task) -> None:
        self._restore()

    def on_exception(self, task: Task) -> None:
        self._restore()

    def _restore(self) -> None:
        while self.previous:
            signal.signal(*self.previous.popitem())


def _on_any_rank(here: bool, device: torch.device) -> bool:
    if world_size() == 1:
        return here
    return bool(all_reduce_sum(torch.tensor(float(here), device=device)).item() > 0)
