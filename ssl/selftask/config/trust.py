"""Refuse code that a received file names, unless ``trust=true`` is given.

Commands that only read a run, an export or a catalog must not run its code. Recipes given for
training are always trusted. See docs/security.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from selftask.config.keys import Key
from selftask.config.schema import Config
from selftask.errors import UserError
from selftask.files.addresses import is_remote

TRUST = "trust=true   import and call code that the run, file or catalog names (docs/security.md)"
_ADDRESSES = ("model", "dataset", "transform")
"""Fields of ``name: custom`` with a value ``package.module:callable``."""


def take_trust(words: list[str]) -> tuple[list[str], bool]:
    """Return the words without ``trust=``, and whether the last ``trust=`` was ``true``.

    Without any the second result is False.

    Raises:
        UserError: If a value is neither ``true`` nor ``false``.
    """
    values = [word.partition("=")[2] for word in words if word.startswith("trust=")]
    for value in values:
        if value not in ("true", "false"):
            raise UserError(f"trust={value}: expected true or false")
    return [word for word in words if not word.startswith("trust=")], values[-1:] == ["true"]


def code_in(values: Any, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Yield key and address of all code that reading a config would import or call.

    A ``trust: true`` inside the config counts as well, with ``true`` as its address.
    """
    if isinstance(values, list):
        values = dict(enumerate(values))
    elif not isinstance(values, dict):
        return
    if not key and (names := values.get("import")):
        yield from ((("import",), str(n)) for n in (names if isinstance(names, list) else [names]))
    if values.get("trust") is True:  # of a method that reads another run
        yield (*key, "trust"), "true"
    if values.get("name") == "custom":
        yield from (((*key, f), str(values[f])) for f in _ADDRESSES if values.get(f))
    for name, item in values.items():
        yield from code_in(item, (*key, str(name)))


def refuse_code(
    references: Iterable[tuple[Key, str]], received: str, typed: Sequence[str] = ()
) -> None:
    """Raise UserError if ``received`` names code that is not also on the command line.

    Args:
        references: Key and address of the code, from ``code_in``.
        received: The run, file or catalog, for the message.
        typed: Words of the command line.
    """
    named = [
        f"{'.'.join(key)}: {text}" for key, text in references if not _is_typed(key, text, typed)
    ]
    if named:
        raise UserError(
            f"{received}: names code of its own, which reading it would run: {'; '.join(named)}. "
            "If you trust where it comes from, add trust=true (in Python trust=True)"
        )


def refuse_addresses(config: Config, *sections: str) -> None:
    """Raise UserError if a received config has addresses (``s3://...``) from other origins than the
    command line.

    Reading them would send requests to servers that the author of the config chose.

    Args:
        config: The config of a received run.
        *sections: The sections that the command reads, such as ``data``.
    """
    values = config.to_dict()
    for section in sections:
        for key, text in _addresses_in(values[section], section):
            origin = config.place(key)
            if not origin.startswith("command line"):
                raise UserError(
                    f"{origin}: {key}: {text} would be fetched, which the run names and you do not;"
                    f" give {key}=..., or trust=true if you trust where the run comes from"
                )


def _addresses_in(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and is_remote(value):
        yield key, value
    elif isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in parts:
            yield from _addresses_in(item, f"{key}.{name}")


def _is_typed(key: Key, address: str, typed: Sequence[str]) -> bool:
    """Return whether the command line contains the address; modules count only in ``import=``."""
    pattern = re.compile(rf"(?<![\w.]){re.escape(address)}(?![\w.])")
    if key == ("import",):
        typed = [word for word in typed if word.lstrip("+").startswith("import=")]
    return any(pattern.search(word) for word in typed)
