"""Format the resolved config as text, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from selftask.config.keys import Key
from selftask.config.schema import Config

COLUMN = 48  # column in which the origins begin, unless a value is longer


def explain(config: Config) -> str:
    """Return the text of ``config.yaml``, with the origin of each value as a comment.

    The origin is ``file:line``, ``command line: ...`` or a default. Notes on the config come first.
    """
    lines = [f"# note: {note}" for note in config.notes]
    for text, key in _lines(config.to_dict(), (), indent=0):
        origin = _origin(config, key)
        lines.append(_with_origin(text, origin) if origin else text)
    return "\n".join(lines)


def explain_chosen(config: Config, *, without: str = "default") -> list[str]:
    """Return a line with dotted key, value and origin for each value that is not a default.

    Values whose origin starts with ``without``, and values without a recorded origin, are omitted.
    """
    lines = []
    for text, key in _lines(config.to_dict(), (), indent=0):
        origin = _origin(config, key)
        if key is not None and origin and not origin.startswith((without, "default")):
            value = text.strip().removeprefix("- ").partition(": ")[2]
            lines.append(_with_origin(f"{'.'.join(key)}: {value}", origin))
    return lines


def _with_origin(text: str, origin: str) -> str:
    return f"{text:<{COLUMN - 2}}  # {origin}"


def _lines(value: dict[str, Any], key: Key, *, indent: int) -> Iterator[tuple[str, Key | None]]:
    """Yield each line of yaml with the key of its value, or with None for a section's title."""
    pad = " " * indent
    for name, item in value.items():
        inner = (*key, str(name))
        if isinstance(item, dict) and item:
            yield f"{pad}{as_yaml(name)}:", None
            yield from _lines(item, inner, indent=indent + 2)
        elif are_sections(item):
            yield f"{pad}{as_yaml(name)}:", None
            for index, entry in enumerate(item):
                lines = _lines(entry, (*inner, str(index)), indent=indent + 4)
                first, first_key = next(lines)
                yield f"{pad}  - {first.lstrip()}", first_key
                yield from lines
        else:
            yield f"{pad}{as_yaml(name)}: {as_yaml(item)}", inner


def are_sections(value: Any) -> bool:
    """Return whether a value is a nonempty list of sections, such as transforms."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _origin(config: Config, key: Key | None) -> str | None:
    if key is None:
        return None
    return " ".join(config.place(".".join(key)).split())


def as_yaml(value: Any) -> str:
    """Return a value as one line of yaml."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
