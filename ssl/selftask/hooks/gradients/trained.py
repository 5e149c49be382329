"""The parameters trained by a task, with their names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from selftask.hooks.base import Task


def updated_parameters(task: Task) -> list[nn.Parameter]:
    """Return the parameters that ``task.optimizer`` updates."""
    return [p for group in task.optimizer.param_groups for p in group["params"]]


def parameters_of_optimizers(task: Task) -> list[nn.Parameter]:
    """Return the parameters of all optimizers of the task."""
    groups = [group for optimizer in task.all_optimizers for group in optimizer.param_groups]
    return [p for group in groups for p in group["params"]]


def state_of_optimizers(task: Task) -> list[Tensor]:
    """Return the tensors of the state of all optimizers."""
    states = [state for built in task.all_optimizers for state in built.optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def trained_parameters(task: Task) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name (``network.backbone.conv1.weight``) and parameter, for those that are updated."""
    updated = set(parameters_of_optimizers(task))
    for prefix, module in task.trained:
        for name, parameter in module.named_parameters(prefix):
            if parameter in updated:
                yield name, parameter
