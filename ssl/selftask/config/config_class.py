"""Config classes of components, read from source without importing their modules.

A method's ``Config`` is defined in the method's file, which imports torch. Importing it takes 1.5
to 3.5 s of CPU on an idle machine (longer from a network drive), but a mistake in a config should
be reported within 3 s. Therefore only the source lines of the class, its bases and the names that
they use are executed (about 10 ms). Modules that are already imported, as users' own modules always
are, are used directly.

Bases, helper functions and constants may be in any module of the package. If a component is its own
config (a transform, a source), only its fields, ``problems`` and the members that ``problems`` uses
are kept.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import sys
from collections.abc import Iterator
from functools import cache
from threading import RLock
from typing import Any

from selftask.config import field_docs
from selftask.registry import Registry
from selftask.registry.class_source import (
    ClassSource,
    ModuleSource,
    bound_names,
    imported_name,
    is_dataclass,
    module_source,
)

_READING = RLock()  # threads share the namespaces of modules


def config_class(registry: Registry, name: str) -> type | None:
    """Return the config dataclass of a component, or None if it has nothing to configure.

    The dataclass is the nested ``Config``, or the component itself if it is a dataclass. Without an
    import of the component's module, it has only fields, ``problems`` and what ``problems`` uses.
    """
    entry = registry.entry(name)
    if isinstance(entry, ClassSource):
        source = entry.config()
        with _READING:
            return None if source is None else _read(source)
    config = getattr(entry, "Config", None)
    is_its_own = config is None and dataclasses.is_dataclass(entry)
    return entry if is_its_own else config


def config_object(config: type, args: dict[str, Any]) -> Any:
    """Return an instance with these fields, without ``__post_init__``, which may open files."""
    instance: Any = object.__new__(config)
    for name, value in args.items():
        object.__setattr__(instance, name, value)
    return instance


@cache
def _read(source: ClassSource) -> type:
    return _executed(source.module).config(source)


class _Executed:
    """A module whose statements are executed when they are needed, in a separate namespace."""

    def __init__(self, source: ModuleSource) -> None:
        self.source = source
        self.namespace: dict[str, Any] = {"__name__": source.name}
        self._started: set[str] = set()

    def config(self, source: ClassSource) -> type:
        """Return the config class that ``source``, a class of this module, defines."""
        return self._make(source, _reached_members([base.node for base in source.mro()]))

    def _make(self, source: ClassSource, members: set[str]) -> type:
        """Execute a class and its bases, reduced to fields and ``members``; return the class."""
        node = source.node
        bases = [_executed(base.module)._make(base, members) for base in source.bases()]
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

    def _execute(self, statement: ast.stmt) -> None:
        """Execute a statement after the statements that define its names."""
        statement = ast.fix_missing_locations(_Unannotated().visit(copy.deepcopy(statement)))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._define(node.id)
        code = compile(
            ast.Module([statement], []), str(self.source.path), "exec", dont_inherit=True
        )
        exec(code, self.namespace)

    def _define(self, name: str) -> None:
        """Add a name to the namespace, if the module defines it."""
        statement = self.source.statements.get(name)
        if statement is None or name in self._started:
            return
        self._started.add(name)
        if isinstance(statement, ast.ImportFrom) and self.source.shares_package(statement.module):
            module, original = module_source(statement.module or ""), imported_name(statement, name)
            if module and module.name not in sys.modules and original in module.statements:
                _executed(module)._define(original)
                self.namespace[name] = _executed(module).namespace[original]
                return
        self._execute(statement)


@cache
def _executed(source: ModuleSource) -> _Executed:
    return _Executed(source)


class _Unannotated(ast.NodeTransformer):
    """Removes annotations of functions, whose names may be imported for type checkers only."""

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
        matching = [member for member in members if new & set(bound_names(member))]
        attributes = [n.attr for m in matching for n in ast.walk(m) if isinstance(n, ast.Attribute)]
        new = set(attributes) - reached
    return reached


def _kept(node: ast.ClassDef, members: set[str]) -> Iterator[ast.stmt]:
    """Yield ``members`` of a class, and its fields if it is a dataclass."""
    for member in node.body:
        if (is_dataclass(node) and _is_field(member)) or members & set(bound_names(member)):
            yield member


def _is_field(member: ast.stmt) -> bool:
    return isinstance(member, ast.AnnAssign) and "ClassVar" not in ast.unparse(member.annotation)
