"""Config classes are read without importing their modules, with all that they are made of."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from selftask.config.config_class import config_class, config_object
from selftask.registry import REGISTRIES, Registry

JAM = '''
"""A jar, whose config has bases, helpers and constants here and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import heavy
from larder.shelf import LEAST, Lidded, Shelf, too_full
from shop import register_thing

if TYPE_CHECKING:
    from nowhere import Task

LABELS = [word.upper() for word in ("plum", "fig")]

@register_thing("jam")
class Jam(heavy.Jar):
    """A jar of jam."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Lidded):
        label: str = LABELS[0]
        grams: int = LEAST

        @property
        def _over(self) -> int:
            return too_full(self.grams)

        def problems(self, config: Task) -> list[str]:
            """Those of the lid, then its own."""
            over = [f"grams: {self._over} too many"] if self._over else []
            return [*super().problems(config), *over]

        def fill(self) -> heavy.Jar:
            return heavy.fill(self)

@register_thing("plank")
@dataclass(frozen=True, kw_only=True)
class Plank(Shelf):
    width: int = 9
    limit: ClassVar[int] = 5

    def __post_init__(self) -> None:
        raise AssertionError("this opens a shelf")

    def problems(self, config: dict[str, Any]):
        if self.width > self.limit:
            yield f"width: {self.width}; " + self.advice()

    def run(self) -> heavy.Jar:
        return heavy.fill(self)
'''

SHELF = """
from __future__ import annotations
from dataclasses import dataclass
import heavy

LEAST = 100

def too_full(grams: int) -> int:
    return max(0, grams - 10 * LEAST)

class Base:
    tool = heavy.Jar
    def advice(self) -> str:
        return f"at most {self.limit}"

class Shelf(Base, heavy.Jar):
    depth: heavy.Jar

@dataclass(frozen=True, kw_only=True)
class Lidded:
    lid: bool = True

    def problems(self, config) -> list[str]:
        return [] if self.lid else ["lid: none"]
"""


@pytest.fixture
def larder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A package of two modules, both of which import one that is expensive."""
    (tmp_path / "shop.py").write_text(
        "from selftask.registry import Registry\n"
        'THINGS = Registry("thing", "larder")\n'
        "register_thing = THINGS.register\n"
    )
    (tmp_path / "heavy.py").write_text("class Jar: ...\n")
    (tmp_path / "larder").mkdir()
    (tmp_path / "larder/__init__.py").touch()
    (tmp_path / "larder/jam.py").write_text(JAM)
    (tmp_path / "larder/shelf.py").write_text(SHELF)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("shop", "heavy", "larder", "larder.jam", "larder.shelf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    registry: Registry = importlib.import_module("shop").THINGS
    return registry


def _told(registry: Registry, name: str, **args: Any) -> list[str]:
    config: Any = config_class(registry, name)
    return list(config_object(config, args).problems({}))


@pytest.mark.parametrize("imported", [False, True])
def test_bases_helpers_and_constants_from_elsewhere(larder: Registry, imported: bool) -> None:
    if imported:
        importlib.import_module("larder.jam")
    config: Any = config_class(larder, "jam")
    assert [field.name for field in fields(config)] == ["lid", "label", "grams"]
    assert (config().label, config().grams) == ("PLUM", 100)
    problems = _told(larder, "jam", lid=False, label="FIG", grams=1200)
    assert problems == ["lid: none", "grams: 200 too many"]
    assert ("heavy" in sys.modules) is imported


@pytest.mark.parametrize("imported", [False, True])
def test_a_thing_that_is_its_own_config_is_asked_without_being_made(
    larder: Registry, imported: bool
) -> None:
    if imported:
        importlib.import_module("larder.jam")
    config: Any = config_class(larder, "plank")
    assert [field.name for field in fields(config)] == ["width"]
    assert _told(larder, "plank", width=9) == ["width: 9; at most 5"]
    assert ("heavy" in sys.modules) is imported


def test_an_error_in_a_class_that_was_read_shows_its_own_line(larder: Registry) -> None:
    with pytest.raises(TypeError) as error:
        _told(larder, "jam", grams="many")
    last = error.traceback[-1]
    assert last.path.name == "shelf.py"
    assert "10 * LEAST" in str(last.statement)


def test_config_classes_of_all_that_ships_are_read_without_torch() -> None:
    code = (
        "import sys\n"
        "from selftask.config.config_class import config_class\n"
        "from selftask.registry import REGISTRIES\n"
        "read = [config_class(r, name) for r in REGISTRIES.values() for name in r]\n"
        "print(len(read), 'torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": "ssl"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    number, torch = done.stdout.split()
    assert int(number) == sum(len(registry.names()) for registry in REGISTRIES.values())
    assert torch == "False"


def test_threads_read_the_same_classes() -> None:
    code = (
        "import sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from selftask.config.config_class import config_class\n"
        "from selftask.registry import METHODS\n"
        "sys.setswitchinterval(1e-6)\n"
        "names = METHODS.names()[:12] * 4\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    classes = list(pool.map(lambda name: config_class(METHODS, name), names))\n"
        "assert classes[:12] * 4 == classes\n"
    )
    env = {**os.environ, "PYTHONPATH": "ssl"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
