"""Each shipped method has a page, whose facts are those of its class, recipes and files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

import method_tables
from manual import method_pages
from selftask.config.reference import named
from selftask.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]
CARDS = {card.name: card for card in method_tables.cards()}


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return method_pages.pages()


def test_all_methods_have_a_page_and_a_row_of_the_index(made: dict[str, str]) -> None:
    assert {name.removesuffix(".md") for name in made} == {*METHODS.names(), "index"}
    for name, card in CARDS.items():
        assert made["index.md"].count(f"| [{card.title}]({name}.md) | ") == 1
        assert f"\n{name}\n" in made["index.md"]  # toctree


@pytest.mark.parametrize("name", METHODS.names())
def test_a_page_says_what_its_class_says(name: str, made: dict[str, str]) -> None:
    page, kind = made[f"{name}.md"], METHODS[name]
    assert re.search(r"## Loss\n\n\S.+`", page), "a formula"
    assert re.search(r"## When to use it\n\n[A-Z`].+\.\n", page)
    assert not kind.paper or " ".join(kind.paper.split())[:30] in page
    assert not CARDS[name].arxiv or f"https://arxiv.org/abs/{CARDS[name].arxiv}" in page
    assert all(f"| `{key.key}` |" in page for key in named("methods", name).keys)
    assert f"`selftask train {name}/digits`" in page
    assert ("## Differs from the authors' code" in page) == bool(CARDS[name].differences)
    assert "``" not in page.replace("```", "")


def test_gates_are_those_of_the_ledger(made: dict[str, str]) -> None:
    gate = json.loads((ROOT / "proofs/simclr.json").read_text())["gate"]
    row = next(line for line in made["simclr.md"].splitlines() if "untrained network" in line)
    assert f"{gate['figures']['trained']:.3f}" in row and gate["date"] in row


def test_league_and_proofs_have_rows(made: dict[str, str]) -> None:
    runs = json.loads((ROOT / "league/simclr.json").read_text())["digits"]["runs"]
    mean = sum(runs[f"cost_{seed}"]["linear_top1"] for seed in (1, 2, 3)) / 3
    (row,) = (line for line in made["simclr.md"].splitlines() if "on Distorted digits" in line)
    assert (
        f"3 seeds | {mean:.3f} ± " in row and "; raw pixels 0." in row and "; untrained 0." in row
    )
    date = json.loads((ROOT / "proofs/simclr.json").read_text())["kills"]["date"]
    assert f"| kills | ten SIGKILLs do not change the result | {date} |" in made["simclr.md"]
    assert "none, see the header of its digits recipe" in made["jigsaw.md"]


def test_state_and_views_are_read_from_the_classes(made: dict[str, str]) -> None:
    assert "| `queue` |" in made["moco.md"]
    assert "| `covariance` | Moving average of the (uncentered) covariance" in made["tico.md"]
    assert "| `teacher` |" in made["byol.md"] and "`teacher`" not in made["simsiam.md"]
    assert "| views | 2 |" in made["simclr.md"] or "| views | at least 2 |" in made["simclr.md"]
