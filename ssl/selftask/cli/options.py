"""Helpers shared by the commands: options, help, tables, and the check for a single rank."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from selftask.distributed.world import read_world
from selftask.errors import UserError, check_known, nearest
from selftask.files.paths import exists

HELP = ("-h", "--help")


def asks_for_help(argv: list[str]) -> bool:
    """Return whether one of the words is a help option."""
    return any(word in HELP for word in argv)


def run_subcommand(commands: Mapping[str, tuple[str, str]], argv: list[str]) -> int:
    """Run the command that the first word names, or print its usage if the words ask for help.

    Args:
        commands: Module with ``USAGE`` and ``main``, and description, by name.
        argv: The name of the command, and its words.
    """
    command = importlib.import_module(commands[argv[0]][0])
    if asks_for_help(argv):
        print(command.USAGE)
        return 0
    return int(command.main(argv[1:]))


def is_setting(word: str) -> bool:
    """Return whether a word contains ``=`` and is no existing path, with or without ``@STEP``."""
    return "=" in word and not (exists(word) or exists(word.rpartition("@")[0] or word))


def needs_first(words: list[str], message: str, usage: str) -> None:
    """Raise UserError with ``message`` if there is no first word or it is ``key=value``.

    Args:
        words: Words of the command line.
        message: Beginning of the message, such as ``train needs a RECIPE``.
        usage: Usage text, which is appended.
    """
    if not words or is_setting(words[0]):
        raise UserError(f"{message} before any key=value\n{usage}")


def take_options(argv: list[str], types: Mapping[str, type]) -> tuple[list[str], dict[str, Any]]:
    """Separate options (``--workers 4`` or ``--workers=4``) from the other words.

    Args:
        argv: The words of the command line.
        types: Type of each option; a bool takes no value, an int is 0 or more.

    Returns:
        The other words, and the values of the given options.

    Raises:
        UserError: If an option is unknown, or its value is missing or invalid.
    """
    words: list[str] = []
    options: dict[str, Any] = {}
    rest = iter(argv)
    for word in rest:
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        check_known(name, types, f"there is no option {name}")
        if types[name] is bool:
            if equals:
                raise UserError(f"{name} takes no value")
            options[name] = True
            continue
        text = value if equals else next(rest, "")
        if not text:
            raise UserError(f"{name} needs a value")
        if types[name] is int and not text.isdecimal():
            raise UserError(f"{name} {text}: expected 0 or a positive whole number, such as 4")
        options[name] = types[name](text)
    return words, options


def take_keys(words: list[str], defaults: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Separate ``key=value`` words from the others, which may be paths with ``=``.

    Args:
        words: Words of the command line.
        defaults: Value of each key that is not given.

    Returns:
        The other words, and the value of each key.

    Raises:
        UserError: If there is no such key.
    """
    values, rest = dict(defaults), []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or exists(word):
            rest.append(word)
        elif key in defaults:
            values[key] = value
        else:
            raise UserError(f"{word}: there is no key {key!r}; {nearest(key, defaults)}")
    return rest, values


def take(name: str, words: list[str]) -> tuple[str | None, list[str]]:
    """Return the last value of ``name=``, or None, and the remaining words."""
    values = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    rest = [word for word in words if not word.startswith(f"{name}=")]
    return values[-1] if values else None, rest


def refuse_ranks(command: str) -> None:
    """End this process if it is one of several ranks: UserError on rank 0, exit code 2 on others.

    Args:
        command: Name of the command, for the message.
    """
    world = read_world()
    if world.size == 1:
        return
    if world.rank:
        sys.exit(UserError.exit_code)  # one message is enough
    raise UserError(
        f"{command} runs in one process, and {world.launcher} has started {world.size}; start it "
        "without the launcher (train, finetune, features and most evaluations share the work)"
    )
