"""Convert ``key=value`` words of a command to fields of a dataclass, with types and limits."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, TypeVar

import yaml

from selftask.config.values.coerce import Mismatch, check_limits, convert
from selftask.errors import UserError

T = TypeVar("T")


def take_fields(words: list[str], kind: type[T]) -> tuple[T, list[str]]:
    """Return an instance of a dataclass from the words that name its fields, and the other words.

    Args:
        words: Words of the command line; values are YAML, as in a config.
        kind: A dataclass whose fields all have defaults. If it has a method ``problems``, that
            returns error messages.

    Raises:
        UserError: If a value has the wrong type or violates its limits, or if there are problems.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    types = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    rest: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in fields:
            rest.append(word)
            continue
        try:
            values[key] = convert(yaml.safe_load(text), types[key])
            check_limits(values[key], fields[key].metadata)
        except (Mismatch, ValueError) as error:
            raise UserError(f"{word}: {error}") from error
        except yaml.YAMLError as error:
            raise UserError(f"{word}: is not YAML ({type(error).__name__})") from error
    made = kind(**values)
    for problem in getattr(made, "problems", tuple)():
        raise UserError(problem)
    return made, rest
