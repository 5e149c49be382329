"""Number of parameters of a run by part, trained and frozen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from selftask.plan.fake_task import FakeTask


@dataclass(frozen=True)
class Part:
    """Number of parameters of one part.

    Args:
        name: Name of the part, such as ``backbone``, ``method simclr`` or ``teacher``.
        trained: Number of parameters that an optimizer updates.
        frozen: Number of all other parameters.
    """

    name: str
    trained: int
    frozen: int


def parts_of(task: FakeTask) -> list[Part]:
    """Return the parts: children of the network, the method's own parameters and teachers.

    A shared parameter counts for one part only. Parts without parameters are left out.
    """
    trained = set(task.trained_parameters)
    seen: set[nn.Parameter] = set()

    def count(name: str, parameters: list[nn.Parameter]) -> Part:
        new = [p for p in dict.fromkeys(parameters) if p not in seen]
        seen.update(new)
        mine = sum(p.numel() for p in new if p in trained)
        return Part(name, mine, sum(p.numel() for p in new) - mine)

    network = task.base_model
    parts = [count(name, [*child.parameters()]) for name, child in network.named_children()]
    parts.append(count("other parameters of the network", [*network.parameters()]))
    teachers = [p for teacher in task.teachers for p in teacher.parameters()]
    teacher = count("teacher", teachers)
    parts += [count(f"method {task.config.method.name}", [*task.loss.parameters()]), teacher]
    return [part for part in parts if part.trained + part.frozen]
