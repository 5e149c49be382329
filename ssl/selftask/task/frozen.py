"""Parameters that rules of ``optimizer.groups`` freeze for the first steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from selftask.hooks.base import Hook
from selftask.optim.param_groups import Settings

if TYPE_CHECKING:
    from selftask.task import Task


class DropFrozenGradients(Hook):
    """Drops the gradients of frozen parameters, so that the optimizer skips them.

    The gradients are computed and reduced like all others, so that every rank calls the same
    collectives. Whether a parameter is frozen depends on the step only; its optimizer state is
    created when it is unfrozen.
    """

    priority: ClassVar[int] = 0  # before gradients are clipped

    def __init__(self, settings: Iterable[Settings]) -> None:
        super().__init__()
        self.until: dict[int, list[nn.Parameter]] = {}
        for one in settings:
            if one.frozen_steps:
                self.until.setdefault(one.frozen_steps, []).append(one.parameter.value)

    def on_backward(self, task: Task) -> None:
        for step, parameters in self.until.items():
            if task.steps_done < step:
                for parameter in parameters:
                    parameter.grad = None
