"""The architecture is a test: who may import whom, how long a file is, what a name is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from selftask.config.compose.recipes import shipped
from selftask.config.load import load_config
from selftask.registry import HOOKS, METHODS, REGISTRIES, TRAIN_STEPS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ssl" / "selftask"
FILES = sorted(PACKAGE.rglob("*.py"))
LEVELS = [
    {"errors", "registry", "classy", "files", "random", "distributed", "logs", "batch"},
    {"config", "checkpoint"},
    {"data", "models", "optim", "meters", "parallel"},
    {"hooks"},
    {"methods"},
    {"task"},
    {"train_steps", "evaluate"},
    {"equivalence", "run"},
    {"trainer", "slurm"},
    {"cli", "report"},
    {"__main__"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
TORCH_FREE = (
    *("errors", "registry", "config", "cli"),
    *("data/sources", "data/loading/dataset", "data/loading/open_data"),
)
HEAVY = {"torch", "torchvision", "sklearn", "timm", "classy_vision", "rich", "safetensors"}


def part(path: Path) -> str:
    """The module or package right under selftask that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def runtime_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules a file imports outside ``if TYPE_CHECKING``, and whether it does so when loaded."""

    def visit(nodes: list[ast.stmt], at_load: bool) -> Iterator[tuple[str, bool]]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, at_load) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: relative import"
                yield node.module or "", at_load
                yield from ((f"{node.module}.{alias.name}", at_load) for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            else:
                inside = at_load and not isinstance(node, ast.FunctionDef)
                for field in ("body", "orelse", "finalbody"):
                    yield from visit(getattr(node, field, []), inside)
                for handler in getattr(node, "handlers", []):
                    yield from visit(handler.body, inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")).body, True)


def test_imports_only_go_down() -> None:
    wrong = []
    for path in FILES:
        here = part(path)
        if here == "__init__":
            assert not any(name.startswith("selftask") for name, _ in runtime_imports(path))
            continue
        for name, _ in runtime_imports(path):
            words = name.split(".")
            if words[0] != "selftask" or len(words) < 2 or words[1] not in LEVEL:
                continue
            lower = LEVEL[words[1]] < LEVEL[here]
            beside = LEVEL[words[1]] == LEVEL[here] == 0  # single files of the bottom
            if words[1] != here and not lower and not beside:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_every_module_has_its_level() -> None:
    assert {part(path) for path in FILES} - {"__init__"} <= set(LEVEL)


def test_no_method_imports_another() -> None:
    for path in (PACKAGE / "methods").glob("*.py"):
        for name, _ in runtime_imports(path):
            assert not name.startswith("selftask.methods.") or name.startswith(
                "selftask.methods.base"
            ), f"{path.name} imports {name}"


def test_only_classy_imports_classy() -> None:
    for path in FILES:
        if path.name != "classy.py":
            names = [n for n, _ in runtime_imports(path) if n.startswith("classy_vision")]
            assert names == [], path


def test_only_files_imports_iopath_and_fsspec() -> None:
    for path in FILES:
        if part(path) != "files":
            names = [n for n, _ in runtime_imports(path) if n.startswith(("iopath", "fsspec"))]
            assert names == [], path


def test_torch_free_zone() -> None:
    for path in FILES:
        place = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if place.startswith(TORCH_FREE):
            heavy = {n.split(".")[0] for n, at_load in runtime_imports(path) if at_load} & HEAVY
            assert not heavy, f"{place} imports {heavy} when it is loaded"


def test_files_are_short_and_well_named() -> None:
    for path in FILES:
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines"
        for word in path.relative_to(PACKAGE).with_suffix("").parts:
            assert word not in ("utils", "util", "misc", "common", "helpers", "helper"), path
    tops = {part(path) for path in FILES} - {"__init__", "__main__"}
    assert tops & set(sys.stdlib_module_names) <= {"random"}  # as in numpy, torch and jax


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
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    names = {n for n in registry.names() if registry.address(n).path.parent == folder}
    assert names == files


def test_every_method_has_a_recipe_for_digits_and_photographs() -> None:
    for name in METHODS.names():
        if METHODS.address(name).path.parent == PACKAGE / "methods":
            assert {f"{name}/digits", f"{name}/images"} <= set(shipped()), name


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_recipe_loads_and_promises(name: str) -> None:
    folder = ["data=no/such/folder"] if name.endswith(("/images", "/finetune")) else []
    config = load_config(name, folder)
    assert config.method.name == name.split("/")[0]
    assert len(shipped()[name].header) >= 2, f"{name}: a title and a promise are missing"


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


@pytest.mark.parametrize("argv", [["--help"], ["list"], ["config", "simclr"], ["train", "simclrr"]])
def test_quick_commands_import_no_torch(argv: list[str]) -> None:
    code = (
        "import sys; from selftask.cli.main import main\n"
        f"code = main({argv!r})\n"
        "heavy = {'torch', 'torchvision', 'sklearn', 'timm', 'rich'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy)); sys.exit(code)"
    )
    done = tiny.run([sys.executable, "-c", code], ROOT)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    assert done.returncode == (2 if argv[-1] == "simclrr" else 0)
    assert "Traceback" not in done.stderr


def test_nobody_writes_a_shortened_name() -> None:
    """style.md, section 5: full words for what a config says."""
    short = re.compile(r"^    (num_iter|bs|wd|nworkers|ckpt|cfg)\b", re.MULTILINE)
    for path in FILES:
        assert not short.search(path.read_text(encoding="utf-8")), path
