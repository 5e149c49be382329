"""Random settings and damaged recipes: a config, or messages; never anything else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selftask.config.compose import recipes
from selftask.config.load import load_config, to_yaml
from selftask.errors import UserError

VALUES = (
    *("", "null", "~", "-1", "0", "3.5", "1e400", "-inf", "nan", "9" * 100, "9" * 5_000, "true"),
    *("[]", "{}", "[1]", "[[]]", "{name: x}", "{name: [1]}", "{a: 1}", "ü", "a b", "a,b", "'", '"'),
    *("${x}", "${", "$x", "\\", "(", "]", "{", "@", "#", "&", "*", "%", "~/x", "~nobody/x", "/"),
    *("/dev/null", ".", "x" * 300, "a/" * 3_000, "x.npz", "s3://x", "timm:", "os:system", "5%"),
    *("\n", "\x00", "\udcff", "???", "!!python/object:os.system", "0x10", "1_000", "=", "classy:x"),
)
PIECES = (": ", "\n", "  ", "- ", "{", "]", "&a ", "*a", "!!", "|", "\t", "'", "#", "? ", "%")


def keys(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from keys(value, f"{above}{name}.")


def loads(recipe: str, overrides: list[str]) -> None:
    """Loading gives what can be written down, or is refused in a message of bearable length."""
    try:
        text = to_yaml(load_config(recipe, overrides))
    except UserError as error:
        text = str(error)
    assert 0 < len(text.encode(errors="surrogateescape")) < 10_000


@pytest.mark.parametrize("seed", range(10))
def test_random_settings_load_or_are_refused_briefly(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    known = [*keys(load_config("simclr/digits", []).to_dict()), "", "..", "x[0]", "~train", "-x"]
    known.remove("import")
    for _ in range(2):
        loads("simclr/digits", [f"{draw.choice(known)}={draw.choice(VALUES)}" for _ in range(3)])


@pytest.mark.parametrize("seed", range(10))
def test_damaged_recipes(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    recipe = tmp_path / "mine.yaml"
    for name in ("simclr/digits", "dino/digits"):
        text = recipes.shipped()[name].path.read_text()
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(len(text) + 1)
            cut = at + draw.choice([0, 0, 1, 5, 20])
            text = text[:at] + draw.choice([*PIECES, *VALUES])[:300] + text[cut:]
        recipe.write_text(text, encoding="utf-8", errors="surrogateescape")
        loads(str(recipe), [])
