"""Sphinx extension that makes pages of the repository's files to which other pages link.

A link such as ``../ssl/selftask/hooks/base.py`` works on GitHub. In the built documentation it
leads to a page with that file, highlighted, so that it can be read offline. For a folder, the page
is a list of its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "_source"  # folder of the pages


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the handlers of Sphinx's events."""
    app.connect("doctree-read", mark_links, priority=400)  # before Sphinx copies the files
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    app.connect("missing-reference", resolve)
    app.connect("html-collect-pages", pages)
    return {
        "version": "1",
        "parallel_read_safe": True,
        "parallel_write_safe": True,
        "env_version": 1,
    }


def mark_links(app: Sphinx, doctree: nodes.document) -> None:
    """Mark links to files and folders outside docs/ for ``resolve``."""
    document = app.env.docname
    kinds = (addnodes.download_reference, addnodes.pending_xref)
    for node in [node for kind in kinds for node in doctree.findall(kind)]:
        target = _outside(app.env, node["reftarget"], document)
        if target is not None:
            _linked(app.env).setdefault(document, set()).add(target)
            place = {"reftype": "source", "reftarget": target, "refdoc": document}
            node.replace_self(addnodes.pending_xref("", *node.children, refdomain="", **place))


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Node
) -> nodes.reference | None:
    """Return the link to the page of a file or folder; None for other references."""
    if node.get("reftype") != "source":
        return None
    address = app.builder.get_relative_uri(node["refdoc"], f"{FOLDER}/{node['reftarget']}")
    return nodes.reference("", "", *node.children, internal=True, refuri=address)


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the page of each linked file, and of each file in a linked folder."""
    linked = set().union(*_linked(app.env).values())
    folders = {name for name in linked if (ROOT / name).is_dir()}
    inside = {file: name for name in folders for file in _files(ROOT / name)}
    for name in sorted(folders):
        yield f"{FOLDER}/{name}", {"title": f"{name}/", "body": _listing(name, inside)}, "page.html"
    for name in sorted({*linked, *inside} - folders):
        text = (ROOT / name).read_text(encoding="utf-8")
        body = app.builder.highlighter.highlight_block(text, _language(name))  # type: ignore[attr-defined]
        yield (
            f"{FOLDER}/{name}",
            {"title": name, "body": f"<h1>{escape(name)}</h1>{body}"},
            "page.html",
        )


def _outside(env: BuildEnvironment, target: str, document: str) -> str | None:
    """Return the path of a target in the repository, if it is a file or folder outside docs/."""
    place = (Path(env.srcdir) / document).parent / target.partition("#")[0]
    for path in (place.resolve(), Path(f"{place.resolve()}.md")):  # MyST drops the suffix of pages
        inside = path.is_relative_to(ROOT) and not path.is_relative_to(env.srcdir)
        if inside and path.exists():
            return path.relative_to(ROOT).as_posix()
    return None


def _files(folder: Path) -> list[str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    shown = (path for path in files if path.suffix in (".py", ".yaml", ".md", ".toml", ".sh"))
    return [path.relative_to(ROOT).as_posix() for path in shown]


def _listing(name: str, inside: dict[str, str]) -> str:
    up = "../" * (name.count("/") + 1)
    files = (file for file in inside if file.startswith(f"{name}/"))
    items = (
        f'<li><a href="{up}{FOLDER}/{escape(file)}.html">{escape(file)}</a></li>' for file in files
    )
    return f"<h1>{escape(name)}/</h1><ul>{''.join(items)}</ul>"


def _language(name: str) -> str:
    try:
        return get_lexer_for_filename(name).aliases[0]
    except (ClassNotFound, IndexError):
        return "text"


def _linked(env: BuildEnvironment) -> dict[str, set[str]]:
    """Return the files to which each page links."""
    if not hasattr(env, "selftask_linked"):
        env.selftask_linked = {}  # type: ignore[attr-defined]
    return env.selftask_linked  # type: ignore[attr-defined, no-any-return]


def forget(app: Sphinx, env: BuildEnvironment, document: str) -> None:
    """Discard the links of a page before it was changed."""
    _linked(env).pop(document, None)


def merge(
    app: Sphinx, env: BuildEnvironment, documents: list[str], other: BuildEnvironment
) -> None:
    """Add the links that another process found."""
    _linked(env).update(_linked(other))
