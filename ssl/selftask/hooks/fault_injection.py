"""Fault injection, to test the reaction of a cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from selftask.config.fields import setting
from selftask.distributed.collectives import rank
from selftask.hooks.base import Hook
from selftask.logs import get_logger
from selftask.registry import register_hook

if TYPE_CHECKING:
    from selftask.task import Task

log = get_logger(__name__)

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


class InjectedFault(Exception):
    """Raised by ``hooks.fault_injection`` with ``kind: raise``."""


@register_hook("fault_injection")
@dataclass(eq=False, kw_only=True)
class Fault(Hook):
    """``hooks.fault_injection={at: 5, rank: 1, kind: kill}``: in step 5 that rank is killed.

    Nothing happens in a resumed run.
    """

    priority: ClassVar[int] = 5

    at: int  # the step of the fault, after its forward pass; the first step is 1
    rank: int = setting(0, min=0)
    kind: Literal["raise", "kill", "sleep", "stop", "terminate"] = "raise"
    seconds: float = setting(3600.0, min=0)  # of sleep

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.at < 1:
            yield f"at: {self.at}; the first step is 1"

    def on_forward(self, task: Task) -> None:
        if task.resumed or not task.train or task.steps_done + 1 != self.at or rank() != self.rank:
            return
        log.warning(
            "hooks.fault_injection: %s in step %d on rank %d", self.kind, self.at, self.rank
        )
        if self.kind == "raise":
            raise InjectedFault(f"asked for by hooks.fault_injection in step {self.at}")
        if self.kind == "sleep":
            time.sleep(self.seconds)
        else:
            os.kill(os.getpid(), _SIGNALS[self.kind])
