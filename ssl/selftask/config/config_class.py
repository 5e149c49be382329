"""Config classes of components, read from source without importing their modules.

A method's ``Config`` is defined in the method's file, which imports torch. Importing it takes 1.5
to 3.5 s of CPU on an idle machine (longer from a network drive), but a mistake in a config should
be reported within 3 s. Therefore only the class, its bases and the names that these use are
executed (about 10 ms), each from its own lines. Modules that are already imported, as users' own
modules always are, are used directly.

Bases, helper functions and constants may be in any module of the package. If a component is its own
config (a transform, a source), only its fields, ``problems`` and the members that ``problems`` uses
are kept.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from selftask.config import field_docs
from selftask.registry import Registry, parse


def config_class(registry: Registry, name: str) -> type | None:
    """Return the config dataclass of a component, or None if it has nothing to configure.

    The dataclass is the nested ``Config``, or the component itself if it is a dataclass.
    """
    thing = registry.imported(name)
    if thing is not None:
        return _config_of(thing)
    return _read(registry, name)


def config_object(config: type, args: dict[str, Any]) -> Any:
    """Return an instance with these fields, without ``__post_init__``, which may open files."""
    instance: Any = object.__new__(config)
    for name, value in args.items():
        object.__setattr__(instance, name, value)
    return instance


def _config_of(thing: Any) -> type | None:
    config: type | None = getattr(thing, "Config", None)
    if config is not None:
        return config
    return thing if isinstance(thing, type) and is_dataclass(thing) else None


@cache
def _read(registry: Registry, name: str) -> type | None:
    node = registry.definition(name)
    if isinstance(node, ast.FunctionDef):
        return None
    config = _nested_class(node, "Config") or (node if _is_dataclass(node) else None)
    return None if config is None else _source(registry.address(name).module).config(config)


class _Source:
    """A module whose statements are executed one by one, in a separate namespace."""

    def __init__(self, module: str) -> None:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        self.path = Path(spec.origin)
        self.package = module.partition(".")[0]
        self.namespace: dict[str, Any] = {"__name__": module}
        self._statements = {name: node for node in parse(self.path).body for name in _bound(node)}
        self._started: set[str] = set()

    def config(self, node: ast.ClassDef) -> type:
        """Return the config class that a class definition of this module describes."""
        return self._make(node, _reached_members([base for _, base in self._family(node)]))

    def _make(self, node: ast.ClassDef, members: set[str]) -> type:
        """Execute a class and its bases, reduced to their fields and ``members``."""
        bases = [source._make(base, members) for source, base in self._bases(node)]
        names = [f"_base_{number}" for number, _ in enumerate(bases)]
        self.namespace.update(zip(names, bases, strict=True))
        made = ast.ClassDef(
            name=node.name,
            bases=[ast.Name(id=name, ctx=ast.Load()) for name in names],
            keywords=[],
            body=list(_kept(node, members)) or [ast.Pass()],
            decorator_list=[d for d in node.decorator_list if "dataclass" in ast.unparse(d)],
        )
        self._execute(ast.copy_location(made, node))
        cls: type = self.namespace.pop(node.name)
        setattr(cls, field_docs.NAME, field_docs.docs_in(node))
        return cls

    def _family(self, node: ast.ClassDef) -> Iterator[tuple[_Source, ast.ClassDef]]:
        """Yield the class and all its bases in the package, with their modules."""
        yield self, node
        for source, base in self._bases(node):
            yield from source._family(base)

    def _bases(self, node: ast.ClassDef) -> list[tuple[_Source, ast.ClassDef]]:
        return [found for base in node.bases if (found := self._find_class(base)) is not None]

    def _find_class(self, expression: ast.expr) -> tuple[_Source, ast.ClassDef] | None:
        """Return the definition of a class of the package; None for a class from elsewhere."""
        if isinstance(expression, ast.Attribute):  # Base.Config
            outer = self._find_class(expression.value)
            nested = outer and _nested_class(outer[1], expression.attr)
            return (outer[0], nested) if outer and nested else None
        statement = self._statements.get(ast.unparse(expression))
        if isinstance(statement, ast.ClassDef):
            return self, statement
        if isinstance(statement, ast.ImportFrom) and self._is_ours(statement):
            original = _imported_name(statement, ast.unparse(expression))
            return _source(statement.module or "")._find_class(ast.Name(id=original))
        return None

    def _is_ours(self, statement: ast.ImportFrom) -> bool:
        return (statement.module or "").partition(".")[0] == self.package

    def _execute(self, statement: ast.stmt) -> None:
        """Execute a statement after the statements that define its names."""
        statement = ast.fix_missing_locations(_Unannotated().visit(copy.deepcopy(statement)))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._define(node.id)
        code = compile(ast.Module([statement], []), str(self.path), "exec", dont_inherit=True)
        exec(code, self.namespace)

    def _define(self, name: str) -> None:
        """Add a name to the namespace, if the module defines it."""
        statement = self._statements.get(name)
        if statement is None or name in self._started:
            return
        self._started.add(name)
        if isinstance(statement, ast.ImportFrom) and self._is_ours(statement):
            module, original = statement.module or "", _imported_name(statement, name)
            if module not in sys.modules and original in _source(module)._statements:
                _source(module)._define(original)
                self.namespace[name] = _source(module).namespace[original]
                return
        self._execute(statement)


@cache
def _source(module: str) -> _Source:
    return _Source(module)


class _Unannotated(ast.NodeTransformer):
    """Remove annotations of functions; their names may be imported for type checkers only."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        self.generic_visit(node)
        return node


def _reached_members(classes: list[ast.ClassDef]) -> set[str]:
    """Return ``problems`` and the names of all members that it uses, directly or indirectly."""
    members = [member for node in classes for member in node.body]
    reached: set[str] = set()
    new = {"problems"}
    while new:
        reached |= new
        used = [member for member in members if new & set(_bound(member))]
        attributes = [n.attr for m in used for n in ast.walk(m) if isinstance(n, ast.Attribute)]
        new = set(attributes) - reached
    return reached


def _kept(node: ast.ClassDef, members: set[str]) -> Iterator[ast.stmt]:
    """Yield ``members`` of a class, and its fields if it is a dataclass."""
    for member in node.body:
        if (_is_dataclass(node) and _is_field(member)) or members & set(_bound(member)):
            yield member


def _is_field(member: ast.stmt) -> bool:
    return isinstance(member, ast.AnnAssign) and "ClassVar" not in ast.unparse(member.annotation)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module or class binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif not (isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _imported_name(statement: ast.ImportFrom, name: str) -> str:
    """Return the original name of an imported name (``import x as name``)."""
    return next(a.name for a in statement.names if name == (a.asname or a.name))


def _nested_class(node: ast.ClassDef, name: str) -> ast.ClassDef | None:
    return next((n for n in node.body if isinstance(n, ast.ClassDef) and n.name == name), None)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
