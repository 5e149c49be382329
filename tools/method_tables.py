"""Write what the docs say about each method, from its class.

    python tools/method_tables.py [--check]

* README.md: the names of all methods.
* docs/method-table.md: a row for each method, from the summary of its class, by family.
* docs/parity.md: the section "Differs from the authors' code" of its docstring.
* docs/expected-curves.md: its loss at chance in the shipped recipes. The formula is the part of the
  docstring of ``chance_loss`` after the first colon.

With --check, nothing is written, and the exit code is 1 if a page is not up to date.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selftask.config.compose.recipes import shipped
from selftask.config.load import load_config
from selftask.config.schema.views import num_views
from selftask.registry import METHODS

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r" \((?:arXiv:(?P<arxiv>\d{4}\.\d{5})|OpenReview:(?P<openreview>[\w-]+))\)"
SUMMARY = re.compile(rf"(?P<title>[^:(]+?)(?:{NUMBER})?: (?P<text>.+)\.")
DIFFERENCES = re.compile(r"^Differs from the authors' code:\n\n(.+?)(?=\n\n|\Z)", re.M | re.S)
BEGIN, END = "<!-- begin: tools/method_tables.py -->", "<!-- end -->"
IN_A_LINE = 12  # names in README.md
ALONE = "Methods of no family"
OF_OPTIONS = ("neighbor_targets", "view_pixels")  # families that most of their methods do not use
NUM_CLASSES = {"digits": 10, "images": 10, "imagenet": 1000}
NUM_DIGITS = 1347  # training images of the digits
TEACHERS = {  # numbers of prototypes or tokens
    "beit/digits": {"num_tokens": 1000},  # timm:test_vit
    "beit/images": {"num_tokens": 1024},  # vqkd/images
    "beit/vit_base_imagenet": {"num_tokens": 8192},
    "cae/digits": {"num_tokens": 1000},
    "cae/images": {"num_tokens": 1024},
    "cae/vit_base_imagenet": {"num_tokens": 8192},
    "distill_prototypes/digits": {"out_dim": 1000},  # timm:test_vit
    "distill_prototypes/images": {"out_dim": 4096, "patch_dim": 4096},  # dinov2/images
    "igpt/digits": {"num_colors": 512},
    "igpt/images": {"num_colors": 512},
    "igpt/causal_vit_imagenet": {"num_colors": 512},
}


@dataclass(frozen=True)
class Card:
    """What a method's class says about it."""

    name: str
    title: str
    text: str
    arxiv: str | None
    openreview: str | None
    """Number of a paper that is not on arXiv."""
    differences: str
    """Bullets, or an empty string."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    old = outdated()
    for path, text in old.items():
        print(f"{path.relative_to(ROOT)}: {'not up to date' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(old))


def outdated() -> dict[Path, str]:
    """Return the pages that are not up to date, with their new text."""
    between = rf"(?P<head>{re.escape(BEGIN)}\n).*?(?={END})"
    pages = {
        ROOT / "README.md": (between, names()),
        ROOT / "docs/method-table.md": (between, families()),
        ROOT / "docs/expected-curves.md": (table("| method | formula |"), chance_rows()),
        ROOT / "docs/parity.md": (between, differences()),
    }
    made = {}
    for path, (pattern, lines) in pages.items():
        text = path.read_text(encoding="utf-8")
        (match,) = re.finditer(pattern, text, re.M | re.S)
        new = "".join([text[: match.end("head")], *lines, text[match.end() :]])
        if new != text:
            made[path] = new
    return made


def table(head: str) -> str:
    """Return a pattern for the rows of the table whose header begins with ``head``."""
    return rf"^(?P<head>{re.escape(head)}[^\n]*\n\|[-|]+\|\n)(?:\|[^\n]*\n)*"


def cards() -> Iterator[Card]:
    """Yield what each shipped method says about itself.

    Raises:
        SystemExit: If a summary does not name the method.
    """
    for name in METHODS.names():
        doc = ast.get_docstring(METHODS.definition(name)) or ""
        match = SUMMARY.fullmatch(doc.partition("\n")[0])
        if match is None:
            example = '"""DINO (arXiv:2104.14294): one sentence."""'
            raise SystemExit(f"{METHODS.address(name)}: begin the docstring as in {example}")
        bullets = DIFFERENCES.search(doc)
        yield Card(name, **match.groupdict(), differences=bullets[1] if bullets else "")


def names() -> Iterator[str]:
    """Yield lines with the names of all methods."""
    every = [f"`{name}`" for name in METHODS.names()]
    for first in range(0, len(every), IN_A_LINE):
        comma = "," if first + IN_A_LINE < len(every) else ""
        yield ", ".join(every[first : first + IN_A_LINE]) + f"{comma}\n"


def families() -> Iterator[str]:
    """Yield a table for each family, under the first sentence of its docstring."""
    members: dict[str, list[Card]] = {}
    for card in cards():
        members.setdefault(family(card.name), []).append(card)
    for sentence in sorted(members, key=lambda sentence: (sentence == ALONE, sentence)):
        yield f"\n**{sentence}**\n\n| method | what it does | paper |\n|---|---|---|\n"
        for card in members[sentence]:
            yield f"| `{card.name}` | {card.title}: {card.text} | {paper_link(card)} |\n"
    yield "\n"


def paper_link(card: Card) -> str:
    if card.openreview:
        return f"[{card.openreview}](https://openreview.net/forum?id={card.openreview})"
    return f"[{card.arxiv}](https://arxiv.org/abs/{card.arxiv})" if card.arxiv else ""


def family(method: str) -> str:
    """Return what the family of a method has in common: the first sentence about it."""
    modules = [
        kind.__module__
        for kind in METHODS[method].__mro__
        if ".families." in kind.__module__ and not kind.__module__.endswith(OF_OPTIONS)
    ]
    if not modules:
        return ALONE
    sentence, _, _ = (sys.modules[modules[0]].__doc__ or "").partition(".")
    return " ".join(sentence.split())


def differences() -> Iterator[str]:
    for card in cards():
        if card.differences:
            yield f"\n**{card.title}**\n\n{markdown(card.differences)}\n"
    yield "\n"


def markdown(text: str) -> str:
    """Return a docstring as markdown, with code in single backticks."""
    return text.replace("``", "`").replace(" * ", " \N{MULTIPLICATION SIGN} ")


def chance_rows() -> Iterator[str]:
    """Yield a row for each method with a loss at chance: the formula, and values of recipes."""
    for name in METHODS.names():
        doc = METHODS[name].chance_loss.__doc__.partition("\n\n")[0]
        _, colon, formula = " ".join(doc.split()).partition(": ")
        if colon:
            recipes = (f"{name}/digits", f"{name}/images", large_recipe(name))
            values = map(chance, recipes, NUM_CLASSES.values())
            yield f"| `{name}` | {markdown(formula.removesuffix('.'))} | {' | '.join(values)} |\n"


def chance(recipe: str | None, num_classes: int) -> str:
    """Return the loss at chance of a recipe, with two digits.

    No network is built: what a method counts in ``setup`` is set here.
    """
    if recipe is None or recipe not in shipped():
        return "none"
    config = load_config(recipe, ["data=no/such/folder"] if recipe.endswith("/images") else [])
    kind = METHODS[config.method.name]
    method = kind.__new__(kind)
    views = sum(num_views(config.views).values())
    vars(method).update(
        config=SimpleNamespace(**config.method.args),
        num_negatives=views * (config.train.batch_size - 1),
        num_others=views * config.train.batch_size - 1,
        num_pairs=config.train.batch_size,
        batch_size=config.train.batch_size,
        num_strong=views - 2,
        has_clusters=True,
        num_classes=count_classes(kind, config.method.args, num_classes),
        memory=range(NUM_DIGITS),
        **TEACHERS.get(recipe, {}),
    )
    value = method.chance_loss
    return "none" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")


def count_classes(kind: Any, args: dict[str, Any], of_images: int) -> int:
    """Return the number of classes of a method: its own, those of its config or of the images."""
    if "targets" in args:
        return len(args["targets"])
    return getattr(kind, "num_classes", args.get("num_permutations", of_images))


@cache
def large_recipe(method: str) -> str | None:
    """Return the recipe for ImageNet, or for as many images."""
    large = rf"{method}/.*(imagenet|captions)$"
    return max((name for name in shipped() if re.match(large, name)), default=None)


if __name__ == "__main__":
    sys.exit(main())
