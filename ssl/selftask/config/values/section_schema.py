"""Fields of a section or component, with their types.

Does not import torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any

from selftask.config.compose.provenance import show_path
from selftask.config.config_class import config_class
from selftask.errors import UserError
from selftask.registry import Registry


@dataclasses.dataclass(frozen=True)
class Schema:
    """Fields of a section, their types, and their owner for messages."""

    fields: dict[str, dataclasses.Field[Any]]
    types: dict[str, Any]
    owner: str  # for messages and origins: "simclr (ssl/selftask/methods/simclr.py:31)"

    @classmethod
    def of(cls, config: type | None, owner: str = "", without: Iterable[str] = ()) -> Schema:
        """Return the schema of ``config`` except the fields ``without``; empty for None."""
        if config is None:
            return cls({}, {}, owner)
        if not dataclasses.is_dataclass(config):
            raise UserError(
                f"the Config of {owner} is no dataclass; write @dataclass(frozen=True, "
                "kw_only=True) above it"
            )
        fields = {f.name: f for f in dataclasses.fields(config) if f.name not in without}
        try:
            return cls(fields, typing.get_type_hints(config), owner)
        except NameError as error:
            raise UserError(
                f"the Config of {owner}: {error}; its fields may use builtins and typing only"
            ) from error

    def __or__(self, other: Schema) -> Schema:
        """Return the fields of both."""
        fields, types = {**self.fields, **other.fields}, {**self.types, **other.types}
        return Schema(fields, types, self.owner)


def schema_of(registry: Registry, name: str) -> Schema:
    """Return the schema of a component."""
    address = registry.address(name)
    owner = f"{name} ({show_path(address.path)}:{address.line})"
    return Schema.of(config_class(registry, name), owner)
