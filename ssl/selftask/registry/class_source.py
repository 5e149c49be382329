"""Classes read from source, with their bases, without importing their modules.

Importing torch takes seconds, so a config is checked before any module that imports it. Bases and
their attributes are read like the class itself, from any module of the same package, in Python's
method resolution order. Bases from other packages are ignored.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from selftask.errors import UserError


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; it is cached and must be treated as read-only."""
    return ast.parse(path.read_text(encoding="utf-8"))


class ModuleSource:
    """Parsed source of a module, as returned by ``module_source``.

    Attributes:
        name: Dotted name of the module.
        path: Its file.
        statements: Name -> the statement at the top level of the module that binds it.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.statements = {name: node for node in parse(path).body for name in bound_names(node)}

    def member(self, name: str) -> ClassSource | ModuleSource | None:
        """Return the class or module of this top-level package that a name refers to, or None."""
        statement = self.statements.get(name)
        if isinstance(statement, ast.ClassDef):
            return ClassSource(self, statement)
        if isinstance(statement, ast.ImportFrom) and self.shares_package(statement.module):
            module = module_source(statement.module or "")
            return module.member(imported_name(statement, name)) if module else None
        if isinstance(statement, ast.Import):
            alias = next(a for a in statement.names if name == bound_name(a))
            name = alias.name if alias.asname else bound_name(alias)
            return module_source(name) if self.shares_package(name) else None
        return module_source(f"{self.name}.{name}")

    def find(self, expression: ast.expr) -> ClassSource | ModuleSource | None:
        """Return the class or module of ``name``, ``module.name`` or ``Class.Nested``, or None."""
        if isinstance(expression, ast.Attribute):
            outer = self.find(expression.value)
            return outer.member(expression.attr) if outer else None
        return self.member(expression.id) if isinstance(expression, ast.Name) else None

    def shares_package(self, module: str | None) -> bool:
        """Return True if another module is in the same top-level package."""
        return (module or "").partition(".")[0] == self.name.partition(".")[0]


class ClassSource(NamedTuple):
    """Parsed source of a class."""

    module: ModuleSource
    node: ast.ClassDef

    def bases(self) -> list[ClassSource]:
        """Return the direct bases that are in the same top-level package."""
        bases = (self.module.find(base) for base in self.node.bases)
        return [base for base in bases if isinstance(base, ClassSource)]

    def mro(self) -> list[ClassSource]:
        """Return the class and its bases in the package, in Python's method resolution order."""
        return [kind.__dict__["source"] for kind in _stand_in(self).__mro__[:-1]]

    def member(self, name: str) -> ClassSource | None:
        """Return the nested class ``name`` of this class or a base, or None."""
        for source in self.mro():
            for node in source.node.body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return ClassSource(source.module, node)
        return None

    def config(self) -> ClassSource | None:
        """Return the nested ``Config``, or the class itself if it is a dataclass, or None."""
        nested = self.member("Config")
        if nested is None and any(is_dataclass(source.node) for source in self.mro()):
            return self
        return nested

    def value_of(self, attribute: str) -> tuple[Path, ast.expr] | None:
        """Return (file, expression) that sets an attribute in this class or a base, or None."""
        for source in self.mro():
            for node in reversed(source.node.body):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    if ast.unparse(target) == attribute:
                        return source.module.path, node.value
        return None


@cache
def _stand_in(source: ClassSource) -> type:
    """Return an empty class with the same bases, so that Python computes the resolution order."""
    return type(source.node.name, tuple(map(_stand_in, source.bases())), {"source": source})


@cache
def module_source(name: str) -> ModuleSource | None:
    """Return the parsed source of a module, or None if there is no such file; imports nothing."""
    top, *parts = name.split(".")
    spec = importlib.util.find_spec(top)
    path = Path(spec.origin) if spec and spec.origin else None
    for part in parts:
        if path is None or path.name != "__init__.py":
            return None
        paths = path.parent / part / "__init__.py", path.parent / f"{part}.py"
        path = next(filter(Path.is_file, paths), None)
    return ModuleSource(name, path) if path and path.suffix == ".py" else None


def definition(path: Path, registration: str) -> ast.ClassDef | ast.FunctionDef:
    """Return the syntax tree of the class or function that is decorated with ``registration``.

    Args:
        path: The file.
        registration: The call in the decorator, such as ``register_hook('timing')``.

    Raises:
        UserError: If the file has none.
    """
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            for call in node.decorator_list:
                if ast.unparse(call).endswith(registration):
                    return node
    raise UserError(f"{path}: no class or function stands under @{registration}")


@cache
def class_source(module: str, path: Path, registration: str) -> ClassSource | None:
    """Return the parsed source of a registered class in a module; None for a function."""
    source, node = module_source(module), definition(path, registration)
    assert source is not None
    return ClassSource(source, node) if isinstance(node, ast.ClassDef) else None


@cache
def is_dataclass(node: ast.ClassDef) -> bool:
    """Return whether a class has a decorator with ``dataclass`` in its text."""
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module or class binds; none under TYPE_CHECKING."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from map(bound_name, statement.names)
    elif not (isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def bound_name(alias: ast.alias) -> str:
    """Return the name that an import binds: ``a`` for ``import a.b``."""
    return alias.asname or alias.name.partition(".")[0]


def imported_name(statement: ast.ImportFrom, name: str) -> str:
    """Return the original name of an imported name (``import x as name``)."""
    return next(a.name for a in statement.names if name == (a.asname or a.name))
