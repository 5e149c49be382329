"""Equal blocks of a deep network: simulate only a few of them and extrapolate.

The cost of a step is linear in the number of equal blocks. A ViT-g has 40 blocks; with few of them
a step on fake tensors takes a tenth of the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from selftask.config.checks.requirements import required
from selftask.plan.fake_task import FakeTask

_MIN_BLOCKS = 16  # networks with fewer equal blocks are simulated completely
_STEPS = ("standard", "manual")  # train steps with one forward and one backward pass


@dataclass(frozen=True)
class Repeated:
    """Consecutive equal blocks.

    Args:
        container: Name of their Sequential or ModuleList, in the network and in teachers.
        names: Names of the blocks in the container.
    """

    container: str
    names: list[str]

    @contextmanager
    def only(self, number: int, networks: list[nn.Module]) -> Iterator[None]:
        """Context in which the networks have only the first ``number`` of the blocks."""
        containers = [network.get_submodule(self.container) for network in networks]
        before = [container._modules for container in containers]
        dropped = set(self.names[number:])
        for container in containers:
            kept = ((k, m) for k, m in container._modules.items() if k not in dropped)
            container._modules = OrderedDict(kept)  # type: ignore[assignment]
        try:
            yield
        finally:
            for container, modules in zip(containers, before, strict=True):
                container._modules = modules


def repeated_blocks(task: FakeTask) -> Repeated | None:
    """Return the equal blocks of the network, or None if all blocks must be simulated.

    All blocks are needed for a method that reads hidden layers by index, and for train steps with
    several passes, which have several memory peaks.
    """
    config = task.config
    several = config.train.step.name not in _STEPS or config.train.accumulate > 1
    if several or "hidden" in required(config.method.name):
        return None
    found = list(_rows_of_equal_blocks(task.base_model))
    same = all(_has(teacher, row) for teacher in task.teachers for row in found)
    return found[0] if len(found) == 1 and same else None


def _rows_of_equal_blocks(network: nn.Module) -> Iterator[Repeated]:
    for name, module in network.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            for _, row in groupby(module.named_children(), lambda child: _kind(child[1])):
                names = [inner for inner, _ in row]
                if len(names) >= _MIN_BLOCKS:
                    yield Repeated(name, names)


def _kind(block: nn.Module) -> list[Any]:
    """Return a key that is equal for equal blocks: classes of modules, shapes of parameters, ..."""
    modules = [
        (name, type(part), bool(list(part.children()))) for name, part in block.named_modules()
    ]
    shapes = [(name, p.shape, p.requires_grad) for name, p in block.named_parameters()]
    return [modules, shapes]


def _has(network: nn.Module, row: Repeated) -> bool:
    names = {name for name, _ in network.named_modules()}
    return {f"{row.container}.{name}" for name in row.names} <= names
