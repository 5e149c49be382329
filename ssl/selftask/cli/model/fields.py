"""``key=value`` words of a command as fields of a dataclass, by their types and limits."""

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
        words: Of the command line; values are YAML, as in a config.
        kind: A dataclass, all of whose fields have defaults. Its ``problems()``, if it has them,
            are sentences on what is wrong.

    Raises:
        UserError: For values of the wrong type or outside of their limits.
    """
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    types = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    rest: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            rest.append(word)
            continue
        try:
            given[key] = convert(yaml.safe_load(text), types[key])
            check_limits(given[key], known[key].metadata)
        except (Mismatch, ValueError) as error:
            raise UserError(f"{word}: {error}") from error
        except yaml.YAMLError as error:
            raise UserError(f"{word}: is not YAML ({type(error).__name__})") from error
    made = kind(**given)
    for problem in getattr(made, "problems", tuple)():
        raise UserError(problem)
    return made, rest
