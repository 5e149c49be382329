"""The architecture is a test: who may import whom, how long a file is, what a name is."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import tiny
from import_graph import DATA_LEVELS, LEVELS, Graph, circles, imports
from selftask.config.compose.recipes import shipped
from selftask.config.load import load_config, to_yaml
from selftask.registry import HOOKS, METHODS, REGISTRIES, TRAIN_STEPS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ssl" / "selftask"
FILES = sorted(PACKAGE.rglob("*.py"))
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
DATA_LEVEL = {name: number for number, names in enumerate(DATA_LEVELS) for name in names}
TORCH_FREE = (
    *("errors", "registry", "config", "cli"),
    *("data/sources", "data/loading/dataset", "data/loading/open_data"),
)
HEAVY = {"torch", "torchvision", "sklearn", "timm", "classy_vision", "rich", "safetensors"}


@cache
def graph() -> Graph:
    """Return the import graph of the package, which takes seconds to read."""
    return Graph()


def part(path: Path) -> str:
    """The module or package right under selftask that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imported(path: Path) -> set[str]:
    """Names that a file imports at any time, outside ``if TYPE_CHECKING``."""
    return {statement.name for statement in imports(path)}


def level(name: str) -> int:
    """The level of ``selftask.part.module``; a part without one is an error."""
    return LEVEL[name.split(".")[1]]


def test_imports_only_go_down() -> None:
    """Deferred imports and those by importlib, too."""
    wrong = []
    for module, others in graph().edges.items():
        for other in others if module != "selftask" else ():
            if other == "selftask" or other.split(".")[1] == module.split(".")[1]:
                continue
            beside = level(other) == level(module) == 0  # single files of the bottom
            if level(other) >= level(module) and not beside:
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_imports_within_data_only_go_down() -> None:
    """Its sub-packages and modules have levels of their own; parts of one level stay apart."""
    data = "selftask.data."
    parts = {name.split(".")[2] for name in graph().files if name.startswith(data)}
    assert parts == set(DATA_LEVEL)
    wrong = []
    for module in [name for name in graph().files if name.startswith(data)]:
        for other in [name for name in graph().edges[module] if name.startswith(data)]:
            ours, theirs = module.split(".")[2], other.split(".")[2]
            if ours != theirs and DATA_LEVEL[theirs] >= DATA_LEVEL[ours]:
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_no_circle_between_files() -> None:
    assert circles(graph().edges) == []


def test_circles_and_hidden_imports_are_seen(tmp_path: Path) -> None:
    """In a package, deferred, by importlib and by the package's own name."""
    files = {
        "a/__init__.py": '"""A package that exports."""\nfrom a.one import x',
        "a/one.py": "def f():\n    from a import two",
        "a/two.py": 'import importlib\nimportlib.import_module("a.three")',
        "a/three.py": "import a.one",
        "b/__init__.py": "",
        "b/one.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b.two",
        "b/two.py": "try:\n    from b import one\nexcept ImportError:\n    import a",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    graph = Graph(tmp_path)
    assert graph.edges["b.one"] == set() and "a" in graph.edges["b.two"]
    assert circles(graph.edges) == [["a.one", "a.three", "a.two"]]
    assert graph.closure(["b.two"]) >= {"a", "a.one", "a.two", "a.three"}


def test_every_module_has_its_level() -> None:
    assert {part(path) for path in FILES} - {"__init__"} <= set(LEVEL)


def test_families_are_one_level_deep_and_a_method_extends_at_most_one_other() -> None:
    """A reader opens the method, a file for each family, and ``Method``."""
    methods = PACKAGE / "methods"
    for path in methods.rglob("*.py"):
        names = {name for name in graph().edges[graph().module_of(path)] if ".methods." in name}
        names -= {"selftask.methods.base"}
        families = {name for name in names if name.startswith("selftask.methods.families.")}
        if path.parent != methods:
            assert names == set(), f"{path.name} extends more than Method"
        assert len(names - families) <= 1, f"{path.name} imports methods {names - families}"


def test_only_classy_imports_classy() -> None:
    for path in FILES:
        if path.name != "classy.py":
            names = [name for name in imported(path) if name.startswith("classy_vision")]
            assert names == [], path


def test_only_files_imports_iopath_and_fsspec() -> None:
    for path in FILES:
        if part(path) != "files":
            names = [n for n in imported(path) if n.startswith(("iopath", "fsspec"))]
            assert names == [], path


def test_torch_free_zone() -> None:
    for path in FILES:
        place = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if place.startswith(TORCH_FREE):
            heavy = {
                statement.name.split(".")[0] for statement in imports(path) if statement.at_load
            } & HEAVY
            assert not heavy, f"{place} imports {heavy} when it is loaded"


def test_files_are_short_and_well_named() -> None:
    for path in FILES:
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines"
        for word in path.relative_to(PACKAGE).with_suffix("").parts:
            assert word not in ("utils", "util", "misc", "common", "helpers", "helper"), path
    tops = {part(path) for path in FILES} - {"__init__", "__main__"}
    assert tops & set(sys.stdlib_module_names) <= {"random"}  # as in numpy, torch and jax


def test_folders_are_small() -> None:
    """But for those in which every name of a registry has its file."""
    named = {registry.package for registry in REGISTRIES.values()}
    for folder in {path.parent for path in FILES} - {PACKAGE}:
        package = ".".join(("selftask", *folder.relative_to(PACKAGE).parts))
        files = [path for path in folder.glob("*.py") if path.stem != "__init__"]
        assert package in named or len(files) <= 16, f"{folder} has {len(files)} files"
    assert len({part(path) for path in FILES} - {"__init__", "__main__"}) <= 27
    assert len(list(PACKAGE.glob("[!_]*.py"))) <= 6


def test_ssl_is_a_source_root_and_no_package() -> None:
    assert not (ROOT / "ssl" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), "without __init__.py, test files need different names"


def test_module_docstrings_and_postponed_annotations() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not tree.body:
            continue
        assert ast.get_docstring(tree), f"{path} has no docstring"
        if path.name != "__init__.py":
            assert "from __future__ import annotations" in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_name_has_its_file_and_summary(kind: str) -> None:
    registry = REGISTRIES[kind]
    for name in registry.names():
        address = registry.address(name)
        assert address.path.is_file()
        assert registry.summary(name).endswith((".", ":", ")")), f"{kind} {name}: no summary"


@pytest.mark.parametrize("registry", [METHODS, TRAIN_STEPS, HOOKS], ids=lambda r: r.kind)
def test_one_file_per_name(registry: object) -> None:
    folder = PACKAGE / registry.package.split(".")[-1]
    files = {path.stem for path in folder.glob("*.py")} - {
        "__init__",
        "base",
        "frozen",
        "weight_average",
    }
    names = {n for n in registry.names() if registry.address(n).path.parent == folder}
    assert names == files


def test_every_method_has_a_recipe_for_digits_and_photographs() -> None:
    for name in METHODS.names():
        if METHODS.address(name).path.parent == PACKAGE / "methods":
            assert {f"{name}/digits", f"{name}/images"} <= set(shipped()), name


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_recipe_loads_and_promises(name: str, tmp_path: Path) -> None:
    """The config of a run is the one it was started with; the header names paper and promise."""
    needs_data = "/images" in name or name.endswith("/finetune")
    folder = ["data=no/such/folder"] if needs_data else []
    config = load_config(name, folder)
    assert config.method.name == name.split("/")[0]
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(str(path), []) == config
    assert config.eval.transforms, "the exported backbone needs them"
    header = shipped()[name].header
    assert len(header) >= 2, "what it is (paper); the number it promises or 'not run'; the command"


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import ssl, urllib.request; import selftask; assert ssl.SSLContext"],
        ["-c", "import selftask, sys; assert 'torch' not in sys.modules"],
        ["-m", "pytest", "--version"],
        ["-m", "selftask", "--version"],
    ],
)
def test_pythons_own_ssl_from_the_repository_root(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_training_a_resnet_imports_no_timm(tmp_path: Path) -> None:
    """It would take half a second of each start, and twice that with wandb, which timm imports."""
    words = [
        "train",
        "simclr/digits",
        f"out={tmp_path}/run",
        "backbone=resnet18",
        "train.max_steps=1",
        "hooks.evaluation=null",
    ]
    code = (
        "import sys; from selftask.cli.main import main\n"
        f"code = main({words!r})\n"
        "print('timm' in sys.modules, code)"
    )
    done = tiny.run([sys.executable, "-c", code], ROOT)
    assert done.stdout.splitlines()[-1] == "False 0", done.stdout + done.stderr
