"""Names are addresses: found without import, imported on demand, taken only once."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest

from selftask.config.config_class import config_class
from selftask.errors import UserError
from selftask.registry import REGISTRIES, Registry, UnknownName

FRUIT = '''
"""Fruit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shop import register_thing

if TYPE_CHECKING:
    from nowhere import Task

@register_thing("apple")
class Apple:
    """Red or green.

    More about it.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Its fields."""

        colour: Literal["red", "green"] = "red"
        grams: tuple[float, float] = (100, 200)
        limit: ClassVar[int] = 3
        seeds: int | None = None

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.seeds == 0:
                yield "seeds: none"

        def unread(self, task: Task) -> None: ...

@register_thing("pear")
@dataclass(frozen=True, kw_only=True)
class Pear:
    grams: float
    ripe = (1, None)
    shelf: ClassVar[int] = 4

@register_thing("peel")
def peel(thing: Task) -> None:
    """Take the skin off."""
'''


FAMILY = """
from dataclasses import dataclass

class Root:
    shelf = 1
    sort = "any"

class Stone(Root):
    sort = "stone"
    stones: tuple[str, ...] = ("one",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        stone_grams: float = 2.0

class Round(Root):
    shelf = 3
"""
CHERRY = """
from dataclasses import dataclass
import pantry.families as families
from pantry import families as others
from pantry.families.stone import Round as Ball
from shop import register_thing

@register_thing("cherry")
class Cherry(Ball, others.stone.Stone):
    pass

@register_thing("sour_cherry")
class SourCherry(Cherry, families.stone.Round):
    shelf = 4
    stones = Ball.shelf

    @dataclass(frozen=True, kw_only=True)
    class Config(Cherry.Config):
        sour: bool = True
"""


@pytest.fixture
def things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry over a package of one module, ``pantry.fruit``."""
    (tmp_path / "shop.py").write_text(
        "from selftask.registry import Registry\n"
        'THINGS = Registry("thing", "pantry")\n'
        "register_thing = THINGS.register\n"
    )
    (tmp_path / "pantry").mkdir()
    (tmp_path / "pantry/__init__.py").touch()
    (tmp_path / "pantry/fruit.py").write_text(FRUIT)
    (tmp_path / "pantry/families").mkdir()
    (tmp_path / "pantry/families/__init__.py").touch()
    (tmp_path / "pantry/families/stone.py").write_text(FAMILY)
    (tmp_path / "pantry/cherry.py").write_text(CHERRY)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = ("pantry.fruit", "pantry.cherry", "pantry.families", "pantry.families.stone")
    for name in ("shop", "pantry", *modules):
        monkeypatch.delitem(sys.modules, name, raising=False)
    registry: Registry = importlib.import_module("shop").THINGS
    return registry


def test_found_and_described_without_import(things: Registry) -> None:
    assert things.names() == ["apple", "cherry", "pear", "peel", "sour_cherry"]
    assert things.summary("apple") == "Red or green."
    assert things.summary("pear") == "Fruit."  # the module's, where there is no own docstring
    assert things.summary("peel") == "Take the skin off."
    address = things.address("apple")
    assert FRUIT.splitlines()[address.line - 1] == '@register_thing("apple")'
    assert "pantry.fruit" not in sys.modules


def test_imported_on_demand(things: Registry) -> None:
    apple = things["apple"]
    assert apple.__name__ == "Apple"
    assert "pantry.fruit" in sys.modules
    assert things.address("apple").line == FRUIT.splitlines().index('@register_thing("apple")') + 1


@pytest.mark.parametrize("imported", [False, True])
def test_config_is_the_same_read_or_imported(things: Registry, imported: bool) -> None:
    if imported:
        things["apple"]
    config = config_class(things, "apple")
    assert config is not None
    hints: dict[str, Any] = get_type_hints(config) if not imported else {}
    assert [f.name for f in dataclasses.fields(config)] == ["colour", "grams", "seeds"]
    assert hints.get("colour", Literal["red", "green"]) == Literal["red", "green"]
    assert list(config(seeds=0).problems({})) == ["seeds: none"]
    assert config().grams == (100, 200)
    pear = config_class(things, "pear")
    assert pear is not None
    assert pear(grams=1.0).grams == 1.0
    assert config_class(things, "peel") is None


def test_unknown_name_is_a_user_error_with_the_nearest(things: Registry) -> None:
    with pytest.raises(UnknownName, match=r"no thing named 'aple'; did you mean 'apple'\?"):
        things["aple"]
    with pytest.raises(KeyError):
        things["xyz"]
    assert "apple" in things
    assert "aple" not in things


def test_a_declared_attribute_is_read_without_import(things: Registry) -> None:
    read = [things.declared("pear", name, "default") for name in ("ripe", "shelf", "grams")]
    assert read == [(1, None), 4, "default"]
    assert "pantry.fruit" not in sys.modules
    assert things["pear"].shelf == things.declared("pear", "shelf", None) == 4


@pytest.mark.parametrize("imported", [False, True])
def test_declarations_and_config_of_bases_in_other_files(things: Registry, imported: bool) -> None:
    """In Python's method resolution order: of a diamond, the nearer base counts."""
    if imported:
        things["cherry"]
    for name, shelf in (("cherry", 3), ("sour_cherry", 4)):
        read = [things.declared(name, attribute, "default") for attribute in ("sort", "shelf")]
        assert read == ["stone", shelf]
    assert things.declared("cherry", "stones", ()) == ("one",)
    plain, sour = (config_class(things, name) for name in ("cherry", "sour_cherry"))
    assert plain is not None and sour is not None
    assert [field.name for field in dataclasses.fields(plain)] == ["stone_grams"]
    assert [field.name for field in dataclasses.fields(sour)] == ["stone_grams", "sour"]
    assert ("pantry.cherry" in sys.modules) is imported


def test_a_declaration_with_names_is_an_error_at_its_line(things: Registry) -> None:
    line = CHERRY.splitlines().index("    stones = Ball.shelf") + 1
    with pytest.raises(UserError, match=rf"cherry\.py:{line}: `stones` is read before"):
        things.declared("sour_cherry", "stones", ())


@pytest.mark.parametrize("imported", [False, True])
def test_taken_name_shows_both_places(things: Registry, tmp_path: Path, imported: bool) -> None:
    if imported:
        things["apple"]
    (tmp_path / "mine.py").write_text(
        'from shop import register_thing\n\n@register_thing("apple")\nclass Mine: ...\n'
    )
    with pytest.raises(UserError, match=r"taken: at .*fruit\.py:\d+, and again at .*mine\.py:3"):
        importlib.import_module("mine")
    assert things["apple"].__name__ == "Apple"


def test_a_decorator_without_a_name(things: Registry) -> None:
    with pytest.raises(UserError, match=r'give a name: @register_thing\("my_thing"\)'):
        things.register(Registry)  # type: ignore[arg-type]


def test_reload_and_outside_registration(things: Registry, tmp_path: Path) -> None:
    importlib.reload(importlib.import_module("pantry.fruit"))
    (tmp_path / "yours.py").write_text(
        'from shop import register_thing\n\n@register_thing("plum")\nclass Plum:\n    """Blue."""\n'
    )
    importlib.import_module("yours")
    assert things.summary("plum") == "Blue."
    assert config_class(things, "plum") is None
    assert things.address("plum").line == 3


@pytest.mark.parametrize("kind", sorted(REGISTRIES))
def test_every_name_of_the_package_has_its_file_and_summary(kind: str) -> None:
    registry = REGISTRIES[kind]
    for name in registry._index():  # not what other tests have registered
        assert registry.address(name).path.is_file()
        assert registry.summary(name).strip(), f"{registry.kind} {name} has no docstring"
