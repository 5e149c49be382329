"""Lines of code by package: what is counted, and that a commit is compared."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import weight
from import_graph import ROOT

TEXT = '''"""Module."""

# a comment
X = """#
two"""


def f():  # why
    """Doc

    more."""
    return 1
'''


def test_comments_docstrings_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    assert weight.code('def f():\n    """Doc."""\n    return 1\n') == "def f():\n    return 1"
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.py").write_text(TEXT)
    (tmp_path / "a" / "d.py").write_text("x = 1\n")
    (tmp_path / "a" / "e.c").write_text("/* one\n   two */\nint x; // three\n\n// four\nint y;\n")
    lines = weight.weigh(tmp_path)
    assert lines == {".": 5, "a": 5, "a/b": 4, "a/b/c": 4, "a/d": 1, "(C)": 2}


def test_packages_are_sorted_by_weight_and_compared() -> None:
    now = Counter({".": 10, "a": 3, "a/b": 3, "d": 7})
    before = Counter({".": 9, "a": 4, "a/b": 4, "d": 4, "e": 1})
    rows = [row.split() for row in weight.table(now, before, []).splitlines()]
    assert rows == [
        [".", "10", "100.0%", "9", "+1"],
        ["d", "7", "70.0%", "4", "+3"],
        ["a", "3", "30.0%", "4", "-1"],
        ["e", "0", "0.0%", "1", "-1"],
    ]
    assert [row.split()[0] for row in weight.table(now, None, ["a"]).splitlines()] == ["a", "a/b"]


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="no repository")
def test_a_commit_weighs_what_its_files_weigh(tmp_path: Path) -> None:
    command = ["git", "show", "HEAD:ssl/selftask/errors.py"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    assert weight.weigh_commit("HEAD")["errors"] == len(weight.code(text).splitlines())
