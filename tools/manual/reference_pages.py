"""Sphinx extension that writes docs/reference/ from the code before the pages are read.

Keys of configs, names, commands, files and columns of a run come from the tables that the code
itself uses, so that the pages match the installed version. The pages are not in the repository.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from manual.api_pages import api_pages
from manual.levels import packages
from selftask.cli.main import COMMANDS, GROUPS
from selftask.config.reference import NO_DEFAULT, PLACES, KeyEntry, NamedEntry, config_keys, named
from selftask.errors import EXIT_CODES
from selftask.logs.columns import columns
from selftask.logs.events import EVENTS
from selftask.logs.run_files import RUN_FILES
from selftask.registry import REGISTRIES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "reference"  # of docs/
TITLES = {
    "methods": "Methods",
    "train_steps": "Train steps",
    "hooks": "Hooks",
    "backbones": "Backbones",
    "head_blocks": "Blocks of a classifier's head",
    "sources": "Data sources",
    "samplers": "Samplers",
    "tokenizers": "Tokenizers",
    "transforms": "Transforms",
    "optimizers": "Optimizers",
    "schedules": "Schedules",
    "meters": "Meters",
    "evaluations": "Evaluations",
}
CHOSEN = {
    "methods": "`method=NAME`, or the first part of a recipe's name.",
    "train_steps": "`train.step=NAME`.",
    "hooks": "`hooks.NAME={}` or `hooks.NAME.KEY=VALUE`; `hooks.NAME=null` takes a default out.",
    "backbones": "`backbone=NAME`; `timm:MODEL` and `torchvision:MODEL` are short forms.",
    "head_blocks": "an item of `method.head`, or of a list in `method.heads`, of `supervised`.",
    "sources": "`data.name=NAME`; usually found from the path in `data=PATH`.",
    "samplers": "`data.sampler=NAME`.",
    "tokenizers": "`data.tokenizer=NAME`.",
    "transforms": "an item `{name: NAME, KEY: VALUE}` of `views.GROUP.transforms`.",
    "optimizers": "`optimizer=NAME`; any optimizer of torch as `torch:CLASS`.",
    "schedules": "a value `{name: NAME, KEY: VALUE}` of a rate, decay, momentum or temperature.",
    "meters": "`meters.NAME={}`, for test phases.",
    "evaluations": "`eval.evaluations.NAME={}` in training, `selftask eval NAME` afterwards.",
}
ABOUT_KEYS = """\
Every key of a recipe and of the command line, with type, unit, default and meaning; made from the
dataclasses that check them. `selftask explain KEY` prints the same, `selftask config RECIPE` the
values of a recipe and where each comes from. A duration is a number of steps, or text: `500 steps`,
`10 epochs`, `5%` of the training."""
ABOUT_COLUMNS = """\
Parts in capitals stand for names. `selftask explain COLUMN` prints a row of this table; how to read
the columns is in [logs](../logs.md) and [health](../health.md)."""


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages at the start of a build."""
    app.connect("builder-inited", write_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Sphinx) -> None:
    """Write all pages that have changed, and remove those that no longer exist."""
    write(Path(app.srcdir) / FOLDER, pages())


def write(folder: Path, made: dict[str, str]) -> None:
    """Write files (name -> text) that have changed, and remove other pages of the folder."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return file name -> MyST text of every page."""
    made = {"config.md": config_page(), "commands.md": commands_page(), "runs.md": runs_page()}
    made["packages.md"] = packages_page()
    made |= {f"{kind.replace('_', '-')}.md": names_page(kind) for kind in TITLES}
    return made | api_pages()


def config_page() -> str:
    """Return the page of all keys, with one table per section."""
    tables: dict[str, list[KeyEntry]] = {}
    for entry in config_keys():
        section = entry.key.partition(".")[0]
        tables.setdefault(section, []).append(entry)
    single = [entries[0] for entries in tables.values() if len(entries) == 1]
    pages = ", ".join(f"[{title.lower()}]({_file(kind)})" for kind, title in TITLES.items())
    lines = ["# Config keys", ABOUT_KEYS, f"Named things have pages of their own: {pages}."]
    lines += ["## Top level", *table(single)]
    for section, entries in tables.items():
        if len(entries) > 1:
            first, *inner = entries
            lines += [f"## {section}", markdown(first.text), *table(inner)]
    return _joined(lines)


def names_page(kind: str) -> str:
    """Return the page of one kind: each name with its docstring, file and keys."""
    lines = [f"# {TITLES[kind]}", f"Chosen by {CHOSEN[kind]}"]
    for name in REGISTRIES[kind].names():
        lines += named_section(named(kind, name))
    return _joined(lines)


def named_section(thing: NamedEntry) -> Iterator[str]:
    """Yield heading, docstring, file and keys of a name."""
    yield f"## {thing.name}"
    yield markdown(re.split(r"^(?:Args|Returns|Raises|Shape):", thing.text, flags=re.M)[0].strip())
    if paper := REGISTRIES[thing.kind].declared(thing.name, "paper", ""):
        yield markdown(f"Paper: {paper}.")
    path = Path(os.path.relpath(thing.address.path, ROOT / "docs" / FOLDER)).as_posix()
    yield f"[{thing.address.path.name}]({path})"
    if thing.keys:
        yield from table(
            list(thing.keys), prefix=PLACES.get(thing.kind, "").format(name=thing.name)
        )


def table(entries: list[KeyEntry], prefix: str = "") -> Iterator[str]:
    """Yield a table of keys."""
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for entry in entries:
        facts = ", ".join(fact for fact in (entry.type, entry.limits) if fact)
        unit = f" [{entry.unit}]" if entry.unit and "duration" not in entry.type else ""
        default = entry.default if entry.default in ("", *NO_DEFAULT) else f"`{entry.default}`"
        elsewhere = ", ".join(f"`{name}`" for name in entry.also)
        text = markdown(entry.text) + (f" Elsewhere: {elsewhere}." if elsewhere else "")
        cells = (f"`{entry.key}`", markdown(facts) + unit, default, text)
        rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    yield "\n".join(rows)


def commands_page() -> str:
    """Return the page of all commands with their help."""
    lines = [
        "# Commands",
        "`selftask COMMAND --help` prints the same.",
        "## Exit codes",
        _two_columns(EXIT_CODES, "code", "meaning"),
    ]
    grouped = [name for names in GROUPS.values() for name in names if name in COMMANDS]
    for name in [*grouped, *sorted(set(COMMANDS) - set(grouped))]:
        lines += _command(name)
    return _joined(lines)


def _command(name: str) -> Iterator[str]:
    module, _, about = COMMANDS[name]
    command = importlib.import_module(module)
    yield f"## {name}"
    yield about[0].upper() + about[1:] + "."
    yield f"```text\n{command.USAGE}\n```"
    for inner, entry in getattr(command, "COMMANDS", {}).items():
        usage = importlib.import_module(entry[0]).USAGE
        yield f"### {name} {inner}\n\n```text\n{usage}\n```"


def runs_page() -> str:
    """Return the page of a run's files and columns."""
    rows = ["| column | unit | meaning | written by |", "|---|---|---|---|"]
    for column in columns():
        cells = (f"`{column.name}`", column.unit, markdown(column.text), column.written_by)
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
    return _joined(
        [
            "# Files, columns and events of a run",
            "## Files of a run folder",
            _two_columns(RUN_FILES, "file", "content"),
            "## Columns of metrics.jsonl",
            ABOUT_COLUMNS,
            "\n".join(rows),
            "## Events of events.jsonl",
            _two_columns(EVENTS, "event", "meaning"),
            "## Exit codes",
            _two_columns(EXIT_CODES, "code", "meaning"),
        ]
    )


def packages_page() -> str:
    """Return the page of the packages of selftask, by level."""
    rows = ["| level | package | |", "|---|---|---|"]
    rows += [f"| {level} | `{name}` | {markdown(text)} |" for level, name, text in packages()]
    return _joined(["# Packages", "Each imports only those of lower levels.", "\n".join(rows)])


def markdown(text: str) -> str:
    """Return a docstring as markdown: code in single backticks, no accidental emphasis or HTML."""
    parts = re.split(r"(`+[^`]+`+)", text)
    for place, part in enumerate(parts):
        code = place % 2 == 1
        parts[place] = (
            f"`{part.strip('`')}`" if code else re.sub(r"((?<! )\*|\*(?! )|[<\[])", r"\\\1", part)
        )
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _two_columns(content: dict[str, str], left: str, right: str) -> str:
    rows = [f"| {left} | {right} |", "|---|---|"]
    rows += [f"| `{name}` | {_cell(text)} |" for name, text in content.items()]
    return "\n".join(rows)


def _file(kind: str) -> str:
    return f"{kind.replace('_', '-')}.md"


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
