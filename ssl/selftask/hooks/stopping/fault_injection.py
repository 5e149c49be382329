"""Fault injection, to test the reaction of a cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import rank
from selftask.hooks.base import Hook, Task
from selftask.logs import get_logger
from selftask.registry import register_hook

log = get_logger(__name__)

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


class InjectedFault(Exception):
    """Raised by ``hooks.fault_injection`` with ``kind: raise``."""


@register_hook("fault_injection")
@dataclass(eq=False, kw_only=True)
class Fault(Hook):
    """Injects a fault: ``{at: 5, rank: 1, kind: kill}`` kills the process of rank 1 in step 5.

    ``nan_input``, ``nan_output`` and ``nan_gradient`` put NaN into an image, the output of the
    network or a gradient. All other kinds do nothing in a resumed run.
    """

    priority: ClassVar[int] = 5

    at: int
    """Step of the fault, after its forward pass (nan_input: before it); the first step is 1."""
    rank: int = setting(0, min=0)
    """Rank on which the fault happens."""
    kind: Literal[
        "raise", "kill", "sleep", "stop", "terminate", "nan_input", "nan_output", "nan_gradient"
    ] = "raise"
    """Fault: an exception, SIGKILL (kill), a pause, SIGSTOP (stop), SIGTERM (terminate), or NaN."""
    seconds: float = setting(3600.0, min=0)
    """Duration of a sleep, in seconds."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.at < 1:
            yield f"at: {self.at}; the first step is 1"

    def wrap_batches(self, task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if self.kind == "nan_input" and self._is_due(task):
                batch.all_views[0][0].fill_(torch.nan)
            yield batch

    def _is_due(self, task: Task) -> bool:
        return task.train and task.steps_done + 1 == self.at and rank() == self.rank

    def on_forward(self, task: Task) -> None:
        if not self._is_due(task) or (task.resumed and not self.kind.startswith("nan")):
            return
        log.warning(
            "hooks.fault_injection: %s in step %d on rank %d", self.kind, self.at, self.rank
        )
        if self.kind == "raise":
            raise InjectedFault(f"asked for by hooks.fault_injection in step {self.at}")
        if self.kind == "sleep":
            time.sleep(self.seconds)
        elif self.kind == "nan_output":
            task.last_batch.output = _with_nan(task.last_batch.output)
        elif self.kind == "nan_gradient":
            first = next(p for p in task.base_model.parameters() if p.requires_grad)
            self.handle = first.register_hook(self._nan_gradient)
        elif self.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.kind])

    def _nan_gradient(self, gradient: Tensor) -> Tensor:
        self.handle.remove()
        return gradient * torch.nan


def _with_nan(output: Any) -> Any:
    """Return the network's output with its first tensor multiplied by NaN."""
    first, *others = tree_leaves(output)
    return tree_unflatten([first * torch.nan, *others], tree_structure(output))
