"""The parameters trained by a task, with their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from selftask.task import Task


def updated_parameters(task: Task) -> list[nn.Parameter]:
    """Return the parameters that the optimizer updates."""
    return [p for group in task.optimizer.param_groups for p in group["params"]]


def trained_parameters(task: Task) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that the optimizer updates: ``network.backbone.conv1.weight``, ..."""
    updated = set(updated_parameters(task))
    for prefix, module in task.trained:
        for name, parameter in module.named_parameters(prefix):
            if parameter in updated:
                yield name, parameter
