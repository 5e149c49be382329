"""The words that commands of ``selftask eval`` accept: a model, then ``key=value``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import TypeVar

from selftask.cli.model.fields import take_fields
from selftask.cli.options import needs_first
from selftask.errors import UserError, nearest

SECTIONS = ("data", "eval", "image_size", "import", "train")  # train: device, seed, threads
OTHERS = ("weights", "prefix", "trust")

T = TypeVar("T")


def take_model(name: str, argv: list[str], usage: str) -> tuple[str, list[str]]:
    """Return the address of the model and the ``key=value`` words after it.

    Raises:
        UserError: If there is no model; the message includes ``usage``.
    """
    needs_first(argv, f"eval {name} needs a run or model", usage)
    return argv[0], argv[1:]


def take_options(
    name: str, words: list[str], kind: type[T], keys: Collection[str] = ()
) -> tuple[T, list[str]]:
    """Return the options of an evaluation, and the words that set none of them.

    Args:
        name: Name of the evaluation, for messages.
        words: ``key=value`` words.
        kind: Dataclass of the options.
        keys: Additional keys that the command accepts.

    Raises:
        UserError: As ``take_fields``, or for a word that has no effect.
    """
    options, rest = take_fields(words, kind)
    check_words(name, rest, {*(field.name for field in fields(kind)), *keys})  # type: ignore[arg-type]
    return options, rest


def check_words(name: str, words: Iterable[str], keys: Collection[str]) -> None:
    """Raise UserError for a word that has no effect, such as a setting of the optimizer.

    Args:
        name: Name of the evaluation, for the message.
        words: ``key=value`` words.
        keys: Keys of the evaluation itself.
    """
    short = {*keys, *OTHERS}
    for key in sorted({word.partition("=")[0] for word in words} - short):
        if key.partition(".")[0] not in SECTIONS:
            raise UserError(
                f"eval {name}: there is no {key!r}; {nearest(key, {*short, *SECTIONS})}"
            )
