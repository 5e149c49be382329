"""Parameters of a run by part: trained, frozen, and of teachers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from selftask.plan.fake_task import FakeTask


@dataclass(frozen=True)
class Part:
    """Parameters of one part.

    Args:
        name: Such as ``backbone``, ``head`` or ``teacher``.
        trained: Those that the optimizer updates.
        frozen: Those that it does not.
    """

    name: str
    trained: int
    frozen: int


def parts_of(task: FakeTask) -> list[Part]:
    """Return the children of the network, the method's own parameters and the teachers."""
    trained = set(task.trained_parameters)
    seen: set[nn.Parameter] = set()

    def count(name: str, parameters: list[nn.Parameter]) -> Part:
        new = [p for p in dict.fromkeys(parameters) if p not in seen]
        seen.update(new)
        mine = sum(p.numel() for p in new if p in trained)
        return Part(name, mine, sum(p.numel() for p in new) - mine)

    network = task.base_model
    found = [count(name, [*child.parameters()]) for name, child in network.named_children()]
    found.append(count("other parameters of the network", [*network.parameters()]))
    teachers = [p for teacher in task.teachers for p in teacher.parameters()]
    teacher = count("teacher", teachers)
    found += [count(f"method {task.config.method.name}", [*task.loss.parameters()]), teacher]
    return [part for part in found if part.trained + part.frozen]
