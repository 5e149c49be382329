"""``selftask new``: write a method, hook, train step or project from templates."""

from __future__ import annotations

import importlib.machinery
import keyword
import os
import sys
from pathlib import Path
from string import Template

from selftask.errors import UserError, check_known
from selftask.registry import HOOKS, METHODS, TRAIN_STEPS

USAGE = """\
usage: selftask new method|hook|step NAME
       selftask new project NAME

Writes NAME.py, NAME.yaml and test_NAME.py into the current folder: a method, hook or train step
that trains as it is, its recipe and its test, to be changed into yours. `selftask train NAME.yaml`
trains it, `python -m pytest test_NAME.py` tests it, `selftask check NAME import=[NAME]` compares a
method on 1, 2 and 4 ranks.
`new project` writes the folder NAME: a package to install, whose method needs no import=.
No file is overwritten."""

_TEMPLATES = Path(__file__).parent / "templates"
_FILES = {
    **{
        kind: {
            f"{kind}.py": "${name}.py",
            f"{kind}.yaml": "${name}.yaml",
            f"{kind}_test.py": "test_${name}.py",
        }
        for kind in ("method", "hook", "step")
    },
    "project": {
        "project.toml": "${name}/pyproject.toml",
        "project.md": "${name}/README.md",
        "method.py": "${name}/src/${name}/method.py",
        "project.yaml": "${name}/src/${name}/configs/${name}/digits.yaml",
        "project_images.yaml": "${name}/src/${name}/configs/${name}/images.yaml",
        "project_test.py": "${name}/tests/test_${name}.py",
    },
}  # kind -> template -> path of the file to write
_REGISTRIES = {"method": METHODS, "hook": HOOKS, "step": TRAIN_STEPS, "project": METHODS}


def main(argv: list[str]) -> int:
    """Write the files; print their paths and the next steps."""
    if len(argv) != 2:
        raise UserError(f"new needs a kind and a NAME\n{USAGE}")
    kind, name = argv
    check_known(kind, _FILES, f"new: there is no kind {kind!r}")
    _check_name(kind, name)
    files = _fill(kind, name)
    taken = [str(path) for path in files if os.path.lexists(path)]
    if taken:
        raise UserError(f"new: {', '.join(taken)}: there already, and not overwritten")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    print("\n".join(_next_steps(kind, name)))
    return 0


def _check_name(kind: str, name: str) -> None:
    """Raise UserError unless ``name`` is a lowercase identifier that is not in use."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        meant = "".join(c if c.isalnum() else "_" for c in name).strip("_").lower()
        hint = f", such as {meant!r}" if meant.isidentifier() and meant != name else ""
        raise UserError(
            f"new: {name!r}: expected a name of small letters, digits and underscores{hint}"
        )
    registry = _REGISTRIES[kind]
    if name in registry:
        raise UserError(
            f"new: there is a {registry.kind} {name!r} already, at {registry.address(name)}"
        )
    if name in sys.stdlib_module_names or _is_installed(name):
        raise UserError(f"new: {name!r} is the name of an installed module; choose another")


def _is_installed(name: str) -> bool:
    """Return whether Python finds a module of this name outside the current folder."""
    here = ("", os.getcwd())
    path = [folder for folder in sys.path if folder not in here]
    return importlib.machinery.PathFinder.find_spec(name, path) is not None


def _fill(kind: str, name: str) -> dict[Path, str]:
    """Return the texts of the files to write, by path."""
    words = {
        "name": name,
        "dashed": name.replace("_", "-"),
        "Class": "".join(part.capitalize() for part in name.split("_")),
        "module": f"{name}.method" if kind == "project" else name,
        "recipe": "str(RECIPE)" if kind == "project" else f'"{name}.yaml"',
    }
    files = {
        Path(Template(path).substitute(words)): Template(
            (_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
        ).substitute(words)
        for template, path in _FILES[kind].items()
    }
    if kind == "project":
        package = Path(name) / "src" / name / "__init__.py"
        files[package] = f'"""{name}: a self-supervised method for selftask."""\n'
    return files


def _next_steps(kind: str, name: str) -> list[str]:
    if kind == "project":
        return [f"next: pip install -e {name}; selftask train {name}; selftask check {name}"]
    lines = [f"next: selftask train {name}.yaml; python -m pytest test_{name}.py"]
    if kind == "method":
        lines.append(f"      selftask check {name} import=[{name}]")
    return lines
