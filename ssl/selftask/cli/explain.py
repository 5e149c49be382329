"""``selftask explain``: explain a config key, a registered name or a column of metrics.jsonl."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from selftask.config.compose.provenance import show_path
from selftask.config.reference import KeyEntry, NamedEntry
from selftask.errors import UserError, nearest
from selftask.registry import REGISTRIES

if TYPE_CHECKING:
    from selftask.logs.columns import Column

USAGE = """\
usage: selftask explain WORD [...] [import=[MODULE]]

WORD is a key of a config (train.batch_size, or batch_size), a section (train), a registered name
(moco, hooks.timing, random_resized_crop), a column of metrics.jsonl (emb_std), an event, or a file
of a run folder. Prints type, default, limits and meaning; keys are also found by the names that
other frameworks give them (base_lr). import=[MODULE] also explains what your own modules in the
current folder register."""


def main(argv: list[str]) -> int:
    """Print all explanations of each word; return 2 without words."""
    from selftask.config.compose.overrides import import_plugins

    words = import_plugins(argv)
    if not words:
        print(USAGE)
        return 2
    width = shutil.get_terminal_size((100, 24)).columns
    for number, word in enumerate(words):
        texts = list(explanations(word, width)) or list(_variable_columns(word, width))
        if not texts:
            raise UserError(f"nothing is called {word!r}; {nearest(word, known_words())}")
        print(("\n" if number else "") + "\n\n".join(texts))
    return 0


def explanations(word: str, width: int = 100) -> Iterator[str]:
    """Yield a text for each key, registered name, column, event or file called ``word``.

    For a section, another text has all keys in it. If no key has exactly this name, keys that end
    with it, and those with this name in other frameworks, are explained.

    Args:
        word: A word of the command line.
        width: Width of the text in characters; at least 40 are used.
    """
    entries, keys = _things_and_keys()
    exact = [key for key in keys if key.key == word]
    inside = [key for key in keys if key.key.startswith(f"{word}.")] if exact else []
    alike = [key for key in keys if key.key.endswith(f".{word}") or word in key.also]
    for entry, owners in _distinct(exact or alike):
        yield _key(entry, width, owners)
    if inside:
        yield "\n".join(_key(entry, width, owners) for entry, owners in _distinct(inside))
    name = word.removeprefix("eval.")  # as in eval.evaluations.knn
    for named in entries:
        if name in (named.name, f"{named.kind}.{named.name}"):
            yield _named(named, width)
    for name, facts, text in _records():
        if word in (name, name.rstrip("/")):
            yield _text(name, facts, text, width)


def _variable_columns(word: str, width: int) -> Iterator[str]:
    """Yield a text for each description of a column such as ``lr/backbone`` or ``v2/knn_top1``."""
    from selftask.logs.columns import describing

    for column in describing(word):
        yield _text(column.name, _facts_of_column(column), column.text, width)


def known_words() -> set[str]:
    """Return all words that have an explanation."""
    entries, keys = _things_and_keys()
    words = {name for key in keys for name in (key.key, key.key.rpartition(".")[2], *key.also)}
    return words | {entry.name for entry in entries} | {name for name, _, _ in _records()}


def _things_and_keys() -> tuple[list[NamedEntry], list[KeyEntry]]:
    """Return all registered names, and all keys of a config with those of components."""
    from selftask.config.reference import all_named, config_keys

    entries = list(all_named())
    return entries, [*config_keys(), *(key for entry in entries for key in entry.keys)]


def _records() -> Iterator[tuple[str, str, str]]:
    """Yield name, facts and text of the columns, events and files of a run."""
    from selftask.logs.columns import columns
    from selftask.logs.events import EVENTS
    from selftask.logs.run_files import RUN_FILES

    for column in columns():
        yield column.name, _facts_of_column(column), column.text
    yield from ((name, "event in events.jsonl", text) for name, text in EVENTS.items())
    yield from ((name, "in the run folder", text) for name, text in RUN_FILES.items())


def _facts_of_column(column: Column) -> str:
    unit = f", {column.unit}" if column.unit else ""
    return f"column of metrics.jsonl{unit}; {column.written_by}"


def _distinct(keys: list[KeyEntry]) -> list[tuple[KeyEntry, list[str]]]:
    """Return each distinct key with the names of the components that have it."""
    owners: dict[KeyEntry, list[str]] = {}
    for key in keys:
        owners.setdefault(replace(key, owner=""), []).append(key.owner)
    return list(owners.items())


def _key(entry: KeyEntry, width: int, owners: list[str]) -> str:
    names = [name for name in owners if name]
    title = f"{entry.key} ({', '.join(names)})" if names else entry.key
    elsewhere = f" Elsewhere called {', '.join(entry.also)}." if entry.also else ""
    return _text(title, _facts(entry), entry.text + elsewhere, width)


def _facts(entry: KeyEntry) -> str:
    from selftask.config.reference import NO_DEFAULT

    default = entry.default if entry.default in ("", *NO_DEFAULT) else f"default {entry.default}"
    facts = (entry.type, entry.limits, default)
    return ", ".join(fact for fact in facts if fact)


def _named(entry: NamedEntry, width: int) -> str:
    """Format the docstring and keys of a method, hook, ..."""
    kind = REGISTRIES[entry.kind].kind.replace("_", " ")
    location = f"{show_path(entry.address.path)}:{entry.address.line}"
    doc = textwrap.indent(entry.text.replace("``", "`"), "    ")
    keys = [_text(key.key, _facts(key), key.text, width) for key in entry.keys]
    return "\n".join([f"{entry.name}: {kind} [{location}]", doc, *keys])


def _text(title: str, facts: str, text: str, width: int) -> str:
    """Format a title with its facts, followed by the indented text."""
    body = textwrap.fill(
        text.replace("``", "`"),
        max(width, 40),
        initial_indent="    ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return f"{title}: {facts}\n{body}"
