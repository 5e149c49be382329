"""Import graph of the package, read from the source; for tests and the ledger of proofs.

python tools/import_graph.py              print import cycles, if any
python tools/import_graph.py MODULE       print all modules that a module imports, also indirectly
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ssl" / "selftask"
LEVELS = [
    {"errors", "registry", "classy", "files", "random", "distributed", "logs", "batch"},
    {"config", "checkpoint"},
    {"data", "models", "optim", "meters"},
    {"parallel"},
    {"hooks"},
    {"methods"},
    {"task"},
    {"train_steps", "evaluate"},
    {"equivalence", "report", "plan"},
    {"run"},
    {"slurm"},
    {"cli"},
    {"api"},
    {"__main__"},
]
"""Packages and modules of selftask by level; each may import those above it in this list."""
DATA_LEVELS = [
    {"kernel", "reading", "tokenizers"},
    {"source"},
    {"extras", "fingerprint", "labels", "relabeled", "sampling", "subset", "transforms"},
    {"open_source", "views"},
    {"draw_recorder", "sources"},
    {"staging"},
    {"loading"},
    {"device"},
    {"cache"},
    {"data_module"},
    {"inspect"},
]
"""Packages and modules of selftask.data by level, in the same way."""


class Import(NamedTuple):
    """One imported name: ``a.b`` for ``import a.b``, also ``a.b.c`` for ``from a.b import c``."""

    name: str
    line: int
    at_load: bool
    """True if it is imported with the file, False if only when a function is called."""


def imports(path: Path) -> Iterator[Import]:
    """Yield all run-time imports of a file, including those by ``importlib``.

    Imports under ``if TYPE_CHECKING`` are skipped. Raises ValueError for a relative import.
    """
    yield from _visit(_parse(path), path, at_load=True)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _visit(node: ast.AST, path: Path, *, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _visit(other, path, at_load=at_load)
            continue
        yield from (Import(name, child.lineno, at_load) for name in _names(child, path))
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _visit(child, path, at_load=at_load and not function)


def _names(node: ast.AST, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level or node.module is None:
            raise ValueError(f"{path}:{node.lineno}: relative import")
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _is_import_call(node.func):
        constants = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
        yield from (value for value in constants if isinstance(value, str))


def _is_import_call(function: ast.expr) -> bool:
    return ast.unparse(function).rpartition(".")[2] in ("import_module", "__import__")


class Graph:
    """Modules of a source root, and the modules that each of them imports."""

    def __init__(self, root: Path = ROOT / "ssl") -> None:
        self.files = {_module(path, root): path for path in sorted(root.rglob("*.py"))}
        self.edges = {module: self._imported(module) for module in self.files}

    def _imported(self, module: str) -> set[str]:
        """Return the modules of the graph that a module imports.

        Importing ``a.b`` runs ``a/__init__.py`` first, which counts if it has code. It does not
        count for modules in ``a``, whose package is already being imported.
        """
        names = {statement.name for statement in imports(self.files[module])}
        for name in [name for name in names if name in self.files]:
            names |= {name.rpartition(".")[0]}
        modules = {name for name in names if name in self.files and self._has_code(name)}
        return {name for name in modules if not f"{module}.".startswith(f"{name}.")}

    def _has_code(self, module: str) -> bool:
        """Return True if a file has code in addition to a docstring."""
        return any(not isinstance(node, ast.Expr) for node in _parse(self.files[module]).body)

    def closure(self, modules: Iterable[str]) -> set[str]:
        """Return the modules and all that they import, directly or indirectly."""
        seen: set[str] = set()
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += self.edges[module]
        return seen

    def module_of(self, path: Path) -> str:
        """Return the name of a module from its file."""
        return next(name for name, file in self.files.items() if file == path)


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in edges[module]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            start = stack.index(module)
            group = sorted(stack[start:])
            del stack[start:]
            if len(group) > 1:
                groups.append(group)

    for module in edges:
        if module not in number:
            visit(module)
    return groups


def main() -> int:
    graph = Graph()
    if len(sys.argv) > 1:
        print("\n".join(sorted(graph.closure(sys.argv[1:]))))
        return 0
    for group in circles(graph.edges):
        print("circle:", ", ".join(group))
    return 1 if circles(graph.edges) else 0


if __name__ == "__main__":
    sys.exit(main())
