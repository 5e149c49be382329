"""Tables of methods in README and docs are made from the classes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import method_tables
from selftask.registry import METHODS


def test_the_pages_are_up_to_date() -> None:
    """After a change: ``python tools/method_tables.py``."""
    assert list(method_tables.outdated()) == []


def test_a_missing_row_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    names = ("docs/method-table.md", "docs/parity.md", "docs/expected-curves.md", "README.md")
    texts = {name: (method_tables.ROOT / name).read_text(encoding="utf-8") for name in names}
    for name, text in texts.items():
        lines = text.splitlines(keepends=True)
        shorter = [line for line in lines if "| `moco` |" not in line and "**MoCo v2**" not in line]
        assert name == "README.md" or len(shorter) == len(lines) - 1
        (tmp_path / name).write_text("".join(shorter), encoding="utf-8")
    monkeypatch.setattr(method_tables, "ROOT", tmp_path)
    monkeypatch.setattr(method_tables, "chance_rows", lambda: ["| `new` | ln 2 | 1 | 1 | 1 |\n"])
    made = {
        path.relative_to(tmp_path).as_posix(): text
        for path, text in method_tables.outdated().items()
    }
    assert {name: made[name] for name in names[:2]} == {name: texts[name] for name in names[:2]}
    assert "| `new` |" in made[names[2]] and "| `moco` |" not in made[names[2]]


def test_every_method_names_its_paper() -> None:
    """Its number in the summary, on arXiv or OpenReview; authors, title and year in ``paper``."""
    for card in method_tables.cards():
        paper = METHODS.declared(card.name, "paper", "")
        has_number = bool(card.arxiv or card.openreview) or card.name == "igpt"  # in PMLR alone
        assert has_number == bool(paper), card.name
        assert not paper or paper[-4:].isdecimal(), card.name


def test_a_summary_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = ast.parse('class Nameless:\n    """It has no name."""').body[0]
    monkeypatch.setattr(METHODS, "definition", lambda name: nameless)
    with pytest.raises(SystemExit, match=r"\w+\.py:\d+: begin the docstring as in"):
        next(method_tables.cards())
