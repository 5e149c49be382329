"""Log the order of hooks at each point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from selftask.hooks.base import POINTS, Hook, Task, defines
from selftask.logs import get_logger
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("print_hooks")
@dataclass(eq=False, kw_only=True)
class PrintHooks(Hook):
    """Logs at the start of the run which hooks are called at each point, in order."""

    priority: ClassVar[int] = 0

    def on_start(self, task: Task) -> None:
        for line in describe_hooks(task.hooks).splitlines():
            log.info("%s", line)


def describe_hooks(hooks: Iterable[Any]) -> str:
    """Return one line for each point with a hook: ``on_step: SimCLR, Health (60), ...``."""
    hooks = list(hooks)
    lines = []
    for point in POINTS:
        called = [_title(hook) for hook in hooks if defines(hook, point)]
        if called:
            lines.append(f"{point}: {', '.join(called)}")
    return "\n".join(lines)


def _title(hook: Any) -> str:
    """Return the class name and priority of a hook. A method has no priority; it comes first."""
    name, priority = type(hook).__name__, getattr(hook, "priority", 50)
    return name if hasattr(hook, "forward") else f"{name} ({priority})"
