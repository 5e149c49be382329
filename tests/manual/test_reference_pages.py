"""The generated reference names every key, name, command, column and event, and is valid MyST."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("sphinx")

from import_graph import LEVELS
from manual.api_pages import PARTS
from manual.levels import DRAWING, svg
from manual.reference_pages import TITLES, markdown, pages
from selftask.cli.main import COMMANDS
from selftask.config.reference import config_keys, named
from selftask.logs.columns import columns
from selftask.logs.events import EVENTS
from selftask.registry import REGISTRIES


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def test_nothing_is_left_out(made: dict[str, str]) -> None:
    for key in config_keys():
        heading = f"## {key.key}\n" if "section" in key.type else f"| `{key.key}` |"
        assert heading in made["config.md"] or f"| `{key.key}` |" in made["config.md"], key
    for kind in REGISTRIES.keys() - {"tasks"}:
        page = made[f"{kind.replace('_', '-')}.md"]
        for name in REGISTRIES[kind]:
            assert f"## {name}\n" in page
            assert all(f"| `{key.key}` |" in page for key in named(kind, name).keys)
    assert all(f"## {name}\n" in made["commands.md"] for name in COMMANDS)
    assert "### data check\n" in made["commands.md"]
    for name in (*(column.name for column in columns()), *EVENTS):
        assert f"| `{name}` |" in made["runs.md"]
    assert set(TITLES) | {"tasks"} == set(REGISTRIES)
    assert set(PARTS) < {name.removesuffix(".md") for name in made}


def test_the_drawing_of_levels_is_current(made: dict[str, str]) -> None:
    """After a change of LEVELS: python tools/manual/levels.py."""
    assert DRAWING.read_text(encoding="utf-8") == svg()
    for number, names in enumerate(LEVELS):
        for name in names:
            assert f">{name}</text>" in svg()
            assert re.search(rf"\| {number} \| `{name}` \| .+\. \|", made["packages.md"]), name


def test_tables_have_equal_rows(made: dict[str, str]) -> None:
    for name, text in made.items():
        for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
            cells = {len(re.split(r"(?<!\\)\|", row)) for row in block.splitlines()}
            assert len(cells) == 1, (name, block[:200])


def test_docstrings_become_markdown() -> None:
    assert markdown("``a*b`` times *x* in [0, 1] <b>") == "`a*b` times \\*x\\* in \\[0, 1] \\<b>"
