"""Parse ``--options`` of commands whose other words are names and ``key=value``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selftask.errors import UserError, nearest

HELP = ("-h", "--help")


def asks_for_help(argv: list[str]) -> bool:
    """Return whether one of the words is a help option."""
    return any(word in HELP for word in argv)


def take_options(argv: list[str], known: Mapping[str, type]) -> tuple[list[str], dict[str, Any]]:
    """Separate options (``--workers 4`` or ``--workers=4``) from the other words.

    Args:
        words: The words of the command line.
        known: Type of each option; a bool takes no value, an int is 0 or more.

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
        if name not in known:
            raise UserError(f"there is no option {name}; {nearest(name, known)}")
        if known[name] is bool:
            if equals:
                raise UserError(f"{name} takes no value")
            options[name] = True
            continue
        text = value if equals else next(rest, "")
        if not text:
            raise UserError(f"{name} needs a value")
        if known[name] is int and not text.isdecimal():
            raise UserError(f"{name} {text}: expected a number, such as 4")
        options[name] = known[name](text)
    return words, options
