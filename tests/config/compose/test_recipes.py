"""Which file a RECIPE is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from selftask.config.compose import recipes
from selftask.config.load import load_config
from selftask.errors import ConfigError


@pytest.fixture
def shelf(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shelf of recipes in place of the shipped ones."""
    folder = project / "shelf"
    for name in ("base/digits", "toy/digits", "toy/images", "toy/big_folder", "lone/big_folder"):
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("my.yaml", path)
    monkeypatch.setattr(recipes, "folder", lambda: folder)
    return folder


@pytest.mark.parametrize(
    ("recipe", "overrides", "file"),
    [
        ("toy", [], "toy/digits"),
        ("toy", ["data=digits"], "toy/digits"),
        ("toy", ["data=./photos"], "toy/images"),
        ("toy", ["data.name=toy_source"], "toy/images"),
        ("toy/big_folder", ["data=digits"], "toy/big_folder"),
    ],
)
def test_bare_method_follows_the_data(
    shelf: Path, recipe: str, overrides: list[str], file: str
) -> None:
    config = load_config(recipe, overrides)
    assert config.place("method.name") == f"shelf/{file}.yaml:10"
    assert config.recipe == recipe
    assert config.out == f"runs/{recipe.replace('/', '_')}"


def test_yaml_path_from_anywhere(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = load_config(str(shelf.parent / "my.yaml"), [])
    assert config.out == "runs/my"
    assert config.imports == ["toy"]


def test_what_is_no_recipe(shelf: Path) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").touch()
    with pytest.raises(ConfigError, match=r"no recipe 'lone/digits'; known: lone/big_folder"):
        recipes.locate("lone", None)
    with pytest.raises(ConfigError, match=r"did you mean 'run/config.yaml'\?"):
        recipes.locate("run", None)
    with pytest.raises(ConfigError, match=r"known: lone, toy"):
        recipes.locate("qqq", None)
    with pytest.raises(ConfigError, match=r"the method has no recipe of its own"):
        recipes.locate("simclr", None)


def test_header_is_the_promise(shelf: Path) -> None:
    path = shelf / "toy/digits.yaml"
    path.write_text("# Toy on digits.\n# k-NN: 1.00.\n\n# not this\na: 1\n")
    assert recipes.shipped()["toy/digits"].header == ["Toy on digits.", "k-NN: 1.00."]
    assert "base/digits" not in recipes.shipped()
