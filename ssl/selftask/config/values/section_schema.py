"""Fields of a section or component, with their types.

Does not import torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from selftask.config.compose.provenance import show_path
from selftask.config.config_class import config_class
from selftask.config.fields import default_of
from selftask.config.keys import Key, dotted
from selftask.config.values.coerce import Mismatch, check_limits, convert
from selftask.errors import UserError, close_name, nearest
from selftask.registry import Registry


@dataclasses.dataclass(frozen=True)
class Schema:
    """Fields of a section, their types, and their owner for messages."""

    fields: dict[str, dataclasses.Field[Any]]
    types: dict[str, Any]
    owner: str  # for messages and origins: "simclr (ssl/selftask/methods/simclr.py:31)"

    @classmethod
    def of(cls, config: type | None, owner: str = "", without: Iterable[str] = ()) -> Schema:
        """Return the schema of ``config`` except the fields ``without``; empty for None.

        Raises:
            UserError: If ``config`` is not a dataclass, or its annotations cannot be resolved.
        """
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

    def shared_by(self, field: dataclasses.Field[Any]) -> Schema:
        """Return the fields of this schema that a component in one of them may set as well."""
        return Schema({n: self.fields[n] for n in field.metadata["shared"]}, self.types, "")

    def default_problems(self) -> Iterator[str]:
        """Yield a message for each default that would be refused as a value of a config.

        A run would write the default into its ``config.yaml``, which could not be read again.
        """
        for name, field in self.fields.items():
            default = default_of(field)
            is_plain = default is not None and not dataclasses.is_dataclass(default)
            if not is_plain or not field.init or "of" in field.metadata:
                continue
            problem = f"the Config of {self.owner}: the default {name}={default!r}"
            try:
                yaml.safe_dump(default)
                check_limits(convert(default, self.types[name]), field.metadata)
            except yaml.representer.RepresenterError:
                yield f"{problem}: a config has text, numbers, lists and key: value pairs only"
            except (Mismatch, ValueError) as error:
                yield f"{problem}: {error}"
            except UserError:  # an annotation that no value can be given for
                continue

    def hint(self, name: str, key: Key) -> str:
        """Return a hint such as ``did you mean 'optimizer.lr'?`` for an unknown key.

        Keys of inner sections and the names of keys in other frameworks are recognized.

        Args:
            name: The unknown key.
            key: Key of the section that has the fields of this schema.
        """
        for inner, field in self._inner_fields():
            if name in (field.name, *field.metadata.get("also", ())):
                return f"did you mean {dotted((*key, inner, field.name))!r}?"
        words = {word: n for n, f in self.fields.items() for word in f.metadata.get("also", ())}
        words |= {name: name for name in self.fields}
        if close := close_name(name, words):
            return f"did you mean {dotted((*key, words[close]))!r}?"
        return nearest(name, self.fields)

    def _inner_fields(self) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
        """Yield the fields of all sections among the fields, with the name of the section."""
        for name, field in self.fields.items():
            kind = self.types.get(name)
            if dataclasses.is_dataclass(kind) and "of" not in field.metadata:
                for inner in dataclasses.fields(kind):
                    if inner.name != "args" and not inner.metadata.get("flat"):
                        yield name, inner

    def __or__(self, other: Schema) -> Schema:
        """Return a schema with the fields of both and the owner of this one."""
        fields, types = {**self.fields, **other.fields}, {**self.types, **other.types}
        return Schema(fields, types, self.owner)


def schema_of(registry: Registry, name: str) -> Schema:
    """Return the schema of a registered component; empty if it has nothing to configure.

    Raises UserError if there is no such component, or as ``Schema.of``.
    """
    address = registry.address(name)
    owner = f"{name} ({show_path(address.path)}:{address.line})"
    return Schema.of(config_class(registry, name), owner)
