"""``key=value`` arguments of the command line, in Hydra's grammar; keys need no ``+``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser import types as hydra_types
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from selftask.config.compose.merging import set_value, value_at
from selftask.config.compose.provenance import Layer, Layers
from selftask.config.compose.short_forms import expand
from selftask.config.extensions.imports import import_entry_points, import_extensions
from selftask.config.keys import NAMED_ENTRIES, Key, is_path
from selftask.config.schema import DEFAULT_HOOKS
from selftask.errors import UserError, nearest, shorten
from selftask.files.paths import exists, expand_user

MAX_KEY = 300  # characters
_QUOTES = "a value with special characters goes in quotes inside quotes: 'key=\"value\"'"
_SPECIAL = re.compile(r"[\\()\[\]{}:=,]")  # to escape in keys of a mapping, as in `classy:NAME`


@dataclass(frozen=True)
class Override:
    """One parsed ``key=value`` or ``~key``."""

    text: str
    key: Key
    value: Any = None
    delete: bool = False

    @property
    def place(self) -> str:
        """Origin of the value, for messages."""
        return f"command line: {shorten(self.text)}"


def parse_overrides(texts: list[str]) -> tuple[list[Override], list[str]]:
    """Return the overrides with short forms expanded, and a message for each invalid one.

    One that is written with spaces, and otherwise valid, is in both.
    """
    parsed, problems = [], []
    for text, written in _joined(texts):
        try:
            if written != text:
                problems.append(
                    f"command line: {shorten(text)}: settings are written key=value, without "
                    f"spaces: {shorten(written)}"
                )
                text = written  # an unknown key is reported as well, with the nearest one
            parsed.append(_parse(text))
        except UserError as error:
            problems.append(f"command line: {shorten(text)}: {error}")
    return parsed, problems


def _joined(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each override as given and as it must be written; they differ if it was split.

    ``train.epochs = 3`` and ``--epochs 3`` are several arguments, but one mistake.
    """
    rest = list(texts)
    while rest:
        words = [rest.pop(0)]
        if words[0].startswith("--") and "=" not in words[0] and rest and _is_value(rest[0]):
            words.append(rest.pop(0))
            yield " ".join(words), f"{words[0][2:]}={words[1]}"
            continue
        if _is_value(words[0]) and rest and rest[0].startswith("="):
            words.append(rest.pop(0))
        if words[-1].endswith("=") and rest and _is_value(rest[0]):
            words.append(rest.pop(0))
        yield " ".join(words), "".join(words)


def _is_value(text: str) -> bool:
    """Return whether an argument is neither an override nor an option."""
    return "=" not in text and not text.startswith(("-", "~"))


def import_plugins(overrides: Sequence[str]) -> list[str]:
    """Import the plug-ins of installed packages and the modules of ``import=``.

    Returns:
        The other overrides.

    Raises:
        ConfigError: If an import fails, with the line that failed.
    """
    import_entry_points()
    words = [text for text in overrides if text.lstrip("+").startswith("import=")]
    modules = last_value(parse_overrides(words)[0], ("import",))
    if modules:
        import_extensions(modules, [Path.cwd()], "command line")
    return [text for text in overrides if text not in words]


def last_value(overrides: list[Override], key: Key) -> Any:
    """Return the last value that overrides set for a key, directly or in its section, or None."""
    section: dict[str, Any] = {}
    for override in overrides:
        if override.key == key:
            section[key[-1]] = override.value
        elif override.key == key[:-1] and not override.delete:
            section = override.value if isinstance(override.value, dict) else {}
    return section.get(key[-1])


def split_override(text: str) -> tuple[Key, str | None]:
    """Split ``a.b[0]=value`` into the key ``(a, b, 0)`` and the text of the value.

    The text is None without ``=``.
    """
    name, equals, value = text.lstrip("+").partition("=")
    key = tuple(name.strip().replace("[", ".").replace("]", "").split("."))
    return key, value if equals else None


def parse_value(text: str, key: Key) -> hydra_types.Override | None:
    """Parse a value by Hydra's grammar; return None for a path, which is kept as text.

    At the key of a path, only ``null``, and a section, list or quoted string that is not the name
    of a file, are parsed.

    Raises:
        UserError: If the text is not a valid value.
    """
    null = text.lower() == "null"  # a folder of this name is written ./null
    if is_path(key) and not null and (not _is_structured(text) or exists(expand_user(text))):
        return None
    try:
        # Only values use Hydra's grammar: its keys do not allow names such as `classy:NAME`.
        return _parser().parse_override(f"key={text}")
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(_explain(text)) from error


def format_value(value: Any) -> str:
    """Format a plain value for ``key=value``, with every string in quotes."""
    if isinstance(value, dict):
        keys = (_SPECIAL.sub(r"\\\g<0>", str(key)) for key in value)
        pairs = zip(keys, map(format_value, value.values()), strict=True)
        return "{" + ", ".join(f"{key}: {text}" for key, text in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, str):
        return hydra_types.QuotedString(value, hydra_types.Quote.double).with_quotes()
    return json.dumps(value)


def _explain(text: str) -> str:
    """Return an error message for a value that cannot be read.

    The parser's own messages are not used, since they name tokens of its grammar.
    """
    if text.rstrip().endswith(","):
        return "ends with a comma; a list is written key=[a,b], several runs key=a,b"
    for opening, closing in ("[]", "{}", "()"):
        if text.count(opening) != text.count(closing):
            return f"{opening} and {closing} do not match; {_QUOTES}"
    return f"the value cannot be read; {_QUOTES}"


def _parse(text: str) -> Override:
    """Parse one override; raise UserError if it is invalid."""
    if text.startswith("-"):
        raise UserError("there are no options; settings are written key=value")
    key, value = split_override(text.removeprefix("~"))
    if len(text.partition("=")[0]) > MAX_KEY:
        raise UserError(f"no key has more than {MAX_KEY} characters")
    if not all(key) or (value is None and not text.startswith("~")):
        raise UserError("expected key=value")
    if text.startswith("~"):
        return Override(text, key, delete=True)
    assert value is not None
    parsed = parse_value(value, key)
    if parsed is None:
        return Override(text, key, expand(value, key))
    if parsed.is_sweep_override():
        raise UserError(
            "several values, where one is wanted; a list is written key=[a,b], "
            "a text with a comma 'key=\"a,b\"'"
        )
    return Override(text, key, expand(_plain(parsed.value()), key))


def _is_structured(text: str) -> bool:
    """Return whether the value of a path is written as a section, a list or a quoted string."""
    ends = text[:1] + text[-1:]
    return len(text) > 1 and ends in ("{}", "[]", "''", '""')


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def apply_overrides(values: dict[str, Any], layers: Layers, overrides: list[Override]) -> list[str]:
    """Merge overrides into ``values`` and append them to ``layers`` as one layer.

    Args:
        values: Values so far; changed in place.
        layers: Layers so far; changed in place.
        overrides: Parsed overrides, in order.

    Returns:
        A message for each override that cannot be applied.
    """
    problems = []
    layer = Layer({})
    for override in overrides:
        problem = (_delete if override.delete else _set)(values, override)
        if problem:
            problems.append(problem)
        elif override.delete:
            for below in [*layers, layer]:
                below.drop(override.key)
        else:
            layer.record(override.key, override.value, override.place)
    layers.append(layer)
    return problems


def _set(values: dict[str, Any], override: Override) -> str | None:
    key = override.key
    short = value_at(values, key[:-1])[1]
    try:
        if key[0] == "method" and isinstance(short, str):
            # method.teacher=timm:NAME method.teacher.weights=none
            set_value(values, key[:-1], {"model": short})
        if isinstance(override.value, list) and isinstance(value_at(values, key)[1], dict):
            return f"{override.place}: expected a section of key: value pairs"
        removes_all = override.value == {} and key in NAMED_ENTRIES
        set_value(values, key, override.value, merges=not removes_all)
    except (IndexError, ValueError) as error:
        return f"{override.place}: cannot be set: {error}"
    return None


def _delete(values: dict[str, Any], override: Override) -> str | None:
    parent, name = ".".join(override.key[:-1]), override.key[-1]
    section = value_at(values, override.key[:-1])[1]
    if isinstance(section, dict) and name in section:
        del section[name]
        return None
    names = list(section) if isinstance(section, dict) else []
    wrong, hint = ".".join(override.key), nearest(name, names)
    if parent == "hooks" and name in DEFAULT_HOOKS:
        return f"{override.place}: it is a default; {wrong}=null takes it out"
    return f"{override.place}: there is no {wrong!r} to delete; {hint}"


def _plain(value: Any) -> Any:
    """Convert Hydra's quoted strings to plain strings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | bool | None) else str(value)
