"""Descriptions of config keys: the docstring below each field of a config class.

Keys are described nowhere else. ``selftask explain`` and the reference of the documentation show
these texts.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

NAME = "_field_docs"  # attribute of classes that `config_class` builds from parts of a file


def docs_in(node: ast.ClassDef) -> dict[str, str]:
    """Return the description of each field of a class, as one line, by name of the field."""
    docs = {}
    for member, below in zip(node.body, node.body[1:], strict=False):
        if not isinstance(member, ast.AnnAssign) or not isinstance(below, ast.Expr):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[ast.unparse(member.target)] = " ".join(below.value.value.split())
    return docs


def field_docs(config: type) -> dict[str, str]:
    """Return field -> description of a config class and its bases, for fields that have one."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if NAME in vars(base):
            docs |= vars(base)[NAME]
        elif "__dataclass_fields__" in vars(base):
            docs |= _from_source(base)
    return docs


@cache
def _from_source(config: type) -> dict[str, str]:
    """Return the descriptions of an imported class; empty without source, as in a notebook."""
    try:
        source = inspect.getsource(config)
    except (OSError, TypeError):
        return {}
    (node,) = ast.parse(textwrap.dedent(source)).body
    return docs_in(node) if isinstance(node, ast.ClassDef) else {}
