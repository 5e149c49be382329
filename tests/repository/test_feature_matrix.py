"""docs/feature-matrix.tsv: every file, test and command that it names exists."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from selftask.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


def _tool() -> Any:
    path = ROOT / "tools" / "feature_matrix.py"
    spec = importlib.util.spec_from_file_location("feature_matrix", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = _tool()
ROWS = matrix.read_table()


def test_the_page_is_that_of_the_table() -> None:
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(ROWS)


def test_ids_are_unique_and_states_known() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert {row.status for row in ROWS} <= set(matrix.STATES)


def test_features_are_whole_and_told_apart() -> None:
    """Once they were cut at colons and brackets: two rows "Distillation", "(VISSL" at an end."""
    for key in matrix.SOURCES:
        texts = [row.feature for row in ROWS if row.id[0] == key]
        assert len(set(texts)) == len(texts)
    for row in ROWS:
        assert row.feature.count("(") == row.feature.count(")"), row.feature
        assert len(row.feature) <= 120 and row.feature[-1] not in ":;,", row.feature


def test_rows_say_what_their_state_needs() -> None:
    for row in ROWS:
        if row.status == "works":
            assert row.proof, f"{row.id} works, but names no proof"
        else:
            assert row.note, f"{row.id} is {row.status}, but says nothing about it"


def test_what_rows_name_exists() -> None:
    wrong = [f"{row.id}: {text}" for row in ROWS for text in _not_there(row)]
    assert not wrong, "\n".join(wrong)


def _not_there(row: Any) -> Iterator[str]:
    if row.home and not (ROOT / row.home).exists():
        yield row.home
    path, _, test = row.proof.partition("::")
    exists = test in _tests(path) if test else not path or _is_command(path.split())
    if not exists:
        yield row.proof


@cache
def _tests(path: str) -> set[str]:
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _is_command(words: list[str]) -> bool:
    if words[0] == "selftask":
        return words[1] in COMMANDS
    if words[0] == "make":
        return f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    return words[0] == "python" and (ROOT / words[1]).is_file()
