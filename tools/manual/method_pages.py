"""Sphinx extension that writes docs/methods/ before the pages are read: a page for each method.

All of it comes from elsewhere: the class and its config, the headers of the recipes, the ledger in
proofs/ and the league. The pages are not in the repository.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from torch import nn

import gates
import league_page
import ledger
import method_tables
from league_plan import BASELINES, LEAGUES, is_done, network_of
from manual import reference_pages
from selftask.config.compose.recipes import shipped
from selftask.config.reference import named
from selftask.methods.base import Method
from selftask.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "methods"  # of docs/
LEDGER_PAGE = "[Proofs and their ledger](../testing.md#proofs-and-their-ledger)"
REDUCTIONS = {
    "samples": "each image by itself",
    "gathered": "images of all ranks, gathered",
    "statistics": "sums over the images of all ranks",
}


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages at the start of a build."""
    app.connect("builder-inited", write_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Sphinx) -> None:
    """Write all pages that have changed, and remove those of methods that no longer exist."""
    reference_pages.write(Path(app.srcdir) / FOLDER, pages())


def pages() -> dict[str, str]:
    """Return file name -> MyST text of the index and of every page."""
    made = {f"{card.name}.md": page(card) for card in method_tables.cards()}
    return made | {"index.md": index()}


def index() -> str:
    """Return the table of all methods by family, with the use of each."""
    members: dict[str, list[method_tables.Card]] = {}
    for card in method_tables.cards():
        members.setdefault(method_tables.family(card.name), []).append(card)
    advice = (
        "This advice follows from what a method needs. For measurements, see "
        "[Which method](../how-to-own-data.md#which-method) and the [league](../league.md)."
    )
    lines = ["# Methods by family", advice]
    alone = method_tables.ALONE
    for sentence in sorted(members, key=lambda sentence: (sentence == alone, sentence)):
        rows = ["| method | use it | cost |", "|---|---|---|"]
        for card in members[sentence]:
            use = markdown(part(card.name, "Use it").removesuffix("."))
            rows.append(f"| [{card.title}]({card.name}.md) | {_cell(use)} | {cost(card.name)} |")
        lines += [f"## {sentence}", "\n".join(rows)]
    names = "\n".join(METHODS.names())
    lines.append(
        "Cost: CPU time of an image, divided by that of `supervised` on the same network "
        "(`tools/league_cost.py`)."
    )
    lines.append(f"```{{toctree}}\n:hidden:\n\n{names}\n```")
    return "\n\n".join(lines) + "\n"


def page(card: method_tables.Card) -> str:
    """Return the page of a method."""
    name = card.name
    lines = [f"# {card.title}", f"{card.text[0].upper()}{card.text[1:]}."]
    lines += [f"{markdown(METHODS[name].paper)}. {method_tables.paper_link(card)}"] * bool(
        METHODS[name].paper
    )
    lines += ["## Loss", markdown(part(name, "Loss:"))]
    lines += ["## When to use it", markdown(sentence(part(name, "Use it")))]
    lines += ["## What it needs and keeps", "\n".join(needs(name))]
    lines += ["## Figures", "\n".join(figures(name))]
    lines += ["## Proofs", f"See {LEDGER_PAGE} for the commands.", "\n".join(proofs(name))]
    lines += ["## Recipes", "\n".join(recipes(name))]
    entry = named("methods", name)
    if entry.keys:
        lines += ["## Keys", *reference_pages.table(list(entry.keys))]
    if card.differences:
        lines += ["## Differs from the authors' code", method_tables.markdown(card.differences)]
    path = entry.address.path.relative_to(ROOT).as_posix()
    lines.append(f"Code: [{entry.address.path.name}](../../{path})")
    return "\n\n".join(lines) + "\n"


def part(name: str, head: str) -> str:
    """Return the rest of the paragraph of a docstring that begins with ``head``, or nothing."""
    doc = ast.get_docstring(METHODS.definition(name)) or ""
    match = re.search(rf"^{head} (.+?)(?=\n\n|\Z)", doc, re.M | re.S)
    return " ".join(match[1].split()) if match else ""


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def needs(name: str) -> Iterator[str]:
    """Yield a table: views, requirements, ranks, and what the method keeps between steps."""
    kind = METHODS[name]
    yield "| | |"
    yield "|---|---|"
    yield f"| family | {method_tables.family(name)} |"
    yield f"| views | {views(kind.views)} |"
    if kind.requires:
        yield f"| requires | {', '.join(f'`{need}`' for need in kind.requires)} |"
    if kind.min_batch_size > 1:
        yield f"| images of a batch | at least {kind.min_batch_size} |"
    yield f"| compares | {REDUCTIONS[kind.loss_reduction]} |"
    for attribute, text in state(kind).items():
        yield f"| `{attribute}` | {_cell(markdown(text))} |"


def views(count: Any) -> str:
    """Return a class's number of views in words."""
    if isinstance(count, dict):
        return ", ".join(f"`{group}`: {views(number)}" for group, number in count.items())
    if isinstance(count, tuple):
        low, high = count
        return f"at least {low}" if high is None else f"{low} to {high}"
    return str(count)


def state(kind: type) -> dict[str, str]:
    """Return modules, buffers and parameters of a method's own, as its classes' sources say."""
    made: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Method) and base is not Method:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            texts = attribute_texts(tree)
            for node in ast.walk(tree):
                attribute, text = kept(node, vars(sys.modules[base.__module__]))
                if attribute:
                    made[attribute] = texts.get(attribute, text)
    return made


def kept(node: ast.AST, names: dict[str, Any]) -> tuple[str, str]:
    """Return the attribute of the method that a statement creates and what it is, or nothing."""
    match node:
        case ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(name), *_]):
            return str(name), "A buffer."
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name("self"), attr=name)],
            value=ast.Call(func=function),
        ):
            made = resolve(function, names)
            if made is nn.Parameter:
                return name, "Trained parameters."
            if isinstance(made, type) and issubclass(made, nn.Module):
                return name, (made.__doc__ or made.__name__).partition("\n")[0]
    return "", ""


def resolve(function: ast.expr, names: dict[str, Any]) -> Any:
    """Return what a name, or an attribute of a module, stands for; None if it is neither."""
    match function:
        case ast.Name(name):
            return names.get(name)
        case ast.Attribute(value=ast.Name(module), attr=name):
            return getattr(names.get(module), name, None)
    return None


def attribute_texts(tree: ast.Module) -> dict[str, str]:
    """Return attribute -> the text below its annotation in the class's body."""
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    texts = {}
    for node, following in pairwise(body):
        match node, following:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    return texts


def figures(name: str) -> Iterator[str]:
    """Yield a table: the gate of the digits recipe, the leagues, cost, published figures."""
    yield "| | |"
    yield "|---|---|"
    gate = ledger.read(name).get("gate")
    if gate:
        yield (
            f"| `{name}/digits`, {gate.figures['metric']} | {gate.figures['trained']:.3f}, "
            f"untrained network {gate.figures['untrained']:.3f}; the gate is + "
            f"{gate.figures['margin']}; one seed, {gate.date} |"
        )
    elif gates.has_gate(name):
        yield f"| `{name}/digits` | no result in the ledger |"
    for league in LEAGUES:
        yield from league_row(name, league)
    if cost(name):
        yield f"| cost of an image, `supervised` being 1 | {cost(name)} |"
    published = markdown(part(name, "Published:").removesuffix("."))
    if published:
        yield f"| published | {_cell(published)} |"


@cache
def results(league: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a league by method."""
    return league_page.read(ROOT / "league", league)


def league_row(name: str, league: str) -> Iterator[str]:
    """Yield the top-1 accuracies of a method in a league, and those of its baselines."""
    entries = results(league)
    if name not in entries or not is_done(entries[name], LEAGUES[league]):
        return
    runs = league_page.runs_of(entries[name], "cost")
    texts = [top1(runs)]
    for baseline in BASELINES:
        of_network = league_page.runs_of(entries[baseline], network_of(name))
        texts.append(f"{baseline.replace('_', ' ')} {top1(of_network)}")
    yield (
        f"| [league](../league.md) on {LEAGUES[league].title}, equal cost, linear and k-NN top-1, "
        f"{len(runs)} seeds | {'; '.join(texts)} |"
    )


def top1(runs: list[dict[str, Any]]) -> str:
    """Return linear and k-NN top-1 of runs, with their intervals."""
    return " and ".join(league_page.shown(runs, figure) for figure in ("linear_top1", "knn_top1"))


def proofs(name: str) -> Iterator[str]:
    """Yield a table of the proofs in the ledger: what each shows, and when it passed last."""
    yield "| proof | shows | passed |"
    yield "|---|---|---|"
    entries = ledger.read(name)
    for proof in ledger.PROOFS.values():
        entry = entries.get(proof.name)
        if entry is not None:
            passed = entry.date
        elif proof.name == "gate" and not gates.has_gate(name):
            passed = "none, see the header of its digits recipe"
        else:
            passed = "not run"
        yield f"| {proof.name} | {proof.shows} | {passed} |"


def cost(name: str) -> str:
    """Return the cost that the league has measured, as text; "" if it has not."""
    runs = results("digits").get(name, {}).get("runs", {})
    return f"{runs['relative_cost']['relative']:.1f}" if "relative_cost" in runs else ""


def recipes(name: str) -> Iterator[str]:
    """Yield a table of the method's recipes: command and first sentence of their headers."""
    yield "| recipe | |"
    yield "|---|---|"
    for recipe in sorted(recipe for recipe in shipped() if recipe.split("/")[0] == name):
        path = ROOT / f"configs/{recipe}.yaml"
        header = re.findall(r"^#( *)(.*)\n", path.read_text("utf-8"), re.MULTILINE)
        words = " ".join(text for margin, text in header if len(margin) < 3)
        first = re.split(r"(?<=\.) (?=[A-Z`$0-9]|k-NN|solo-learn|timm)", words)[0]
        commands = "\n".join(text for margin, text in header if len(margin) > 2)
        typed = re.search(rf"selftask train {recipe}( .*)$", commands.replace("\\\n", ""), re.M)
        data = typed[1] if typed else " data=DIR" if "/images" in recipe else ""
        yield f"| `selftask train {recipe}{data}` | {_cell(markdown(first))} |"


def markdown(text: str) -> str:
    return reference_pages.markdown(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
