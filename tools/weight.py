"""Count lines of code by package, without comments, docstrings and blank lines.

python tools/weight.py                    packages of selftask, and their share
python tools/weight.py data methods       these, with their sub-packages
python tools/weight.py --since COMMIT     also the lines at another commit, and the difference
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

from import_graph import ROOT

_C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def code(text: str) -> str:
    """Return Python source without comments, docstrings and empty lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            for row in range(node.lineno, node.end_lineno + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def count(path: Path) -> int:
    """Return the number of code lines of a file of Python or C."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return len(code(text).splitlines())
    return sum(1 for line in _C_COMMENT.sub("", text).splitlines() if line.strip())


def weigh(root: Path) -> Counter[str]:
    """Count the code lines of every package and module below a folder.

    Args:
        root: Folder of a package, such as ``ssl/selftask``.

    Returns:
        Lines by path relative to ``root``, without suffix: each file counts for itself and for
        every folder above it, and "." is the whole. Files of C count under "(C)" alone.
    """
    lines: Counter[str] = Counter()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".c", ".h"):
            lines["(C)"] += count(path)
        elif path.suffix == ".py":
            size, name = count(path), path.relative_to(root).with_suffix("")
            for part in (name, *name.parents):
                lines[part.as_posix()] += size
    return lines


def weigh_commit(commit: str) -> Counter[str]:
    """Count the code lines of the package at a commit of this repository."""
    command = ["git", "archive", commit, "ssl/selftask"]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            file.extractall(folder)
        return weigh(Path(folder, "ssl", "selftask"))


def table(now: Counter[str], before: Counter[str] | None, parts: list[str]) -> str:
    """Return rows of name, lines, share and, with ``before``, earlier lines and difference."""
    names = [name for name in now | (before or now) if _is_shown(name, parts)]
    rows = []
    for name in sorted(names, key=lambda name: (-now[name], name)):
        row = f"{name:28}{now[name]:8,}{now[name] / now['.']:8.1%}"
        if before is not None:
            row += f"{before[name]:8,}{now[name] - before[name]:+8,}"
        rows.append(row)
    return "\n".join(rows)


def _is_shown(name: str, parts: list[str]) -> bool:
    if not parts:
        return "/" not in name and name != "__init__"
    return any(name == part or Path(name).parent == Path(part) for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="packages, such as data or data/sources")
    parser.add_argument("--since", metavar="COMMIT")
    options = parser.parse_args()
    before = weigh_commit(options.since) if options.since else None
    print(table(weigh(ROOT / "ssl" / "selftask"), before, options.parts))


if __name__ == "__main__":
    main()
