"""Components: registered names with their arguments. Conversion of sections to yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Component:
    """A registered method, hook, transform, ... with its complete, validated arguments."""

    name: str
    """Registered name."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of its ``Config``, including defaults."""

    def to_dict(self) -> dict[str, Any]:
        """Return ``{name: ..., **args}``, as in the yaml."""
        return {"name": self.name, **plain(self.args)}


@dataclass(frozen=True, kw_only=True)
class HookComponent(Component):
    """A hook with its arguments and its position among the others."""

    priority: int | None = None
    """Hooks run in the order of this number, lowest first; null: the hook's own priority."""

    def to_dict(self) -> dict[str, Any]:
        """Return ``{name: ..., **args}``, with the priority if it is set."""
        order = {} if self.priority is None else {"priority": self.priority}
        return {**super().to_dict(), **order}


def plain(value: Any) -> Any:
    """Return a copy for yaml: tuples become lists, and sections become mappings."""
    if is_dataclass(value) and not isinstance(value, type):
        return own(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def own(section: Any, *, without: Sequence[str] = ()) -> dict[str, Any]:
    names = [f.name for f in fields(section) if f.name not in without]
    return {name: plain(getattr(section, name)) for name in names}


def entries(named: Mapping[str, Component]) -> dict[str, Any]:
    """Return ``key: {args}`` entries, with ``name`` only if it differs from the key."""
    entries = {}
    for key, component in named.items():
        entry = component.to_dict()
        if component.name == key:
            del entry["name"]
        entries[key] = entry
    return entries
