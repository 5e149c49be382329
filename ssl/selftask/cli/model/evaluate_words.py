"""The words that commands of ``selftask eval`` accept: a model or files, then ``key=value``."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import yaml

from selftask.cli.options import needs_first
from selftask.config.values.coerce import Mismatch, check_limits, convert
from selftask.errors import UserError, nearest

SECTIONS = ("data", "eval", "image_size", "import", "train")
OF_TRAIN = ("train", "train.device", "train.seed", "train.threads")
OTHERS = ("weights", "prefix", "trust")

T = TypeVar("T")


def take_model(name: str, argv: list[str], usage: str) -> tuple[str, list[str]]:
    """Return the address of the model and the ``key=value`` words after it.

    Raises:
        UserError: If there is no model; the message includes ``usage``.
    """
    needs_first(argv, f"eval {name} needs a run or model", usage)
    return argv[0], argv[1:]


def take_fields(words: list[str], kind: type[T]) -> tuple[T, list[str]]:
    """Build a dataclass from words that set its fields; return it and the other words.

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


def take_options(
    name: str, words: list[str], kind: type[T], keys: Collection[str] = ()
) -> tuple[T, list[str]]:
    """Return the options of an evaluation, and the words that do not set any of them.

    Args:
        name: Name of the evaluation, for messages.
        words: ``key=value`` words.
        kind: Dataclass of the options.
        keys: Additional keys that the command accepts.

    Raises:
        UserError: As ``take_fields``, or for a word that has no effect.
    """
    options, rest = take_fields(words, kind)
    check_words(f"eval {name}", rest, {*(field.name for field in dataclasses.fields(kind)), *keys})  # type: ignore[arg-type]
    return options, rest


def check_words(
    command: str, words: Iterable[str], keys: Collection[str], sections: Collection[str] = ()
) -> None:
    """Raise UserError for a word that has no effect, such as a setting of the optimizer.

    The constants ``SECTIONS``, ``OF_TRAIN`` and ``OTHERS`` have the keys that all commands accept.

    Args:
        command: Name of the command, for the message.
        words: ``key=value`` words.
        keys: Keys of the command itself.
        sections: Additional sections of the config that the command accepts.
    """
    short, known_sections = {*keys, *OTHERS}, {*SECTIONS, *sections}
    for key in sorted({word.lstrip("+~").partition("=")[0] for word in words} - short):
        section = key.partition(".")[0]
        if section not in known_sections or (section == "train" and key not in OF_TRAIN):
            valid = {*short, *known_sections, *OF_TRAIN} - {"train"}
            raise UserError(f"{command}: there is no {key!r}; {nearest(key, valid)}")
