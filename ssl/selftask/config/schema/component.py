"""Components: registered names with their arguments. Conversion of sections to yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from selftask.config.fields import setting
from selftask.config.keys import Key


@dataclass(frozen=True, kw_only=True)
class Component:
    """A registered method, hook, transform, ... with its complete, validated arguments."""

    name: str
    """Registered name."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of its ``Config``, including defaults."""

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> Component:
        """Return the component of a section ``{name: ..., **args}`` of plain values."""
        args = dict(section)
        return cls(name=args.pop("name"), args=args)

    @classmethod
    def joined(cls, component: Component, values: Mapping[str, Any]) -> Component:
        """Return a component of this class with additional values.

        A value whose name is a field of this class is stored there. The others become arguments,
        except None.
        """
        own = [item.name for item in fields(cls)[2:] if item.name in values]
        others = {n: item for n, item in values.items() if n not in own and item is not None}
        more = {name: values[name] for name in own}
        return cls(name=component.name, args=component.args | others, **more)

    def to_dict(self) -> dict[str, Any]:
        """Return ``{name: ..., **args}`` as plain values, with fields of a subclass unless None."""
        others = {item.name: getattr(self, item.name) for item in fields(self)[2:]}
        set_fields = {name: plain(value) for name, value in others.items() if value is not None}
        return {"name": self.name, **plain(self.args), **set_fields}


@dataclass(frozen=True, kw_only=True)
class HookComponent(Component):
    """A hook with its arguments and its priority."""

    priority: int | None = None
    """Hooks run in the order of this number, lowest first; null: the default of the hook."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (LoRA) and trained parameters of an otherwise frozen backbone."""

    rank: int = setting(8, min=0, also=["r", "lora_rank"])
    """Rank of the adapters: each adapted weight is W + alpha / rank * B A, with B of shape (out,
    rank), which is 0 at first, and A of shape (rank, in); W is frozen. 0: no adapters; only
    ``train`` applies.
    """
    alpha: float = setting(8.0, above=0, also=["lora_alpha"])
    """Scale of the adapters, divided by ``rank``."""
    layers: list[str] | None = setting(None, also=["target_modules"])
    """Names or patterns of the linear, attention and convolution layers to adapt, or of modules
    that contain them: ``["*.attn.qkv", "blocks.11"]``. null: all linear and attention layers, or
    all convolutions if there are none.
    """
    train: list[str] = setting([], also=["modules_to_save", "bias"])
    """Names or patterns of backbone parameters, or of modules that contain them, to train in
    addition to the adapters: ``["*.bias"]``, ``["*norm*"]``. All others are frozen.
    """


@dataclass(frozen=True, kw_only=True)
class BackboneComponent(Component):
    """A backbone with its arguments and its LoRA settings."""

    lora: LoRAConfig | None = None
    """Train low-rank adapters (LoRA) or chosen parameters in place of the whole backbone, such as
    ``{rank: 8}`` or ``{rank: 0, train: ["*.bias"]}``; null: train all of it.
    """


def named_in(value: Any, key: Key) -> Iterator[tuple[Component, Key]]:
    """Yield the components in nested lists, tuples and mappings, with their keys.

    A mapping with a ``name`` is a component, too. Components inside a component are not yielded.
    """
    if isinstance(value, Component):
        yield value, key
    elif isinstance(value, dict) and "name" in value:
        yield Component.from_dict(value), key
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from named_in(item, (*key, str(name)))


class Section:
    """Base of the sections of a config, which are frozen dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return the section as plain values, as in the yaml.

        The keys of ``args`` and of a component whose field is ``flat`` are merged into it.
        """
        values: dict[str, Any] = {}
        for item in fields(self):  # type: ignore[arg-type]
            value = plain(getattr(self, item.name))
            flat = isinstance(value, dict) and (item.metadata.get("flat") or item.name == "args")
            values |= value if flat else {item.name: value}
        return values


def plain(value: Any) -> Any:
    """Return a copy for yaml: tuples become lists, and sections become mappings."""
    if isinstance(value, Component | Section):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {key: _entry(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _entry(key: str, value: Any) -> Any:
    """Return a value of a mapping; a component has a ``name`` only if it differs from the key."""
    entry = plain(value)
    if isinstance(value, Component) and value.name == key:
        del entry["name"]
    return entry
