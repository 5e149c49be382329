"""projects/own_method: a user's package, installed as its author would, is known by name."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from selftask.config.compose import recipes
from selftask.errors import ConfigError

PACKAGE = tiny.ROOT / "projects" / "own_method"


class EntryPoint:
    module = "some_package.method"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configs folder of an installed package with an entry point; return it, empty."""
    package = tmp_path / "some_package"
    (package / "configs").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(recipes.importlib.metadata, "entry_points", lambda group: [EntryPoint])
    return package / "configs"


def test_recipes_of_installed_packages(installed: Path) -> None:
    for name in ("mine/digits", "mine/images", "base/shared"):
        path = installed / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text("# Mine.\n")
    assert recipes.locate("mine", None) == installed / "mine/digits.yaml"
    assert recipes.locate("mine", "folder") == installed / "mine/images.yaml"
    assert recipes.locate("mine/images", None) == installed / "mine/images.yaml"
    assert recipes.available().keys() - recipes.shipped().keys() == {"mine/digits", "mine/images"}
    with pytest.raises(ConfigError, match=r"did you mean 'mine'\?"):
        recipes.locate("mien", None)


def test_a_package_installed_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before = recipes.available().keys()
    info = tmp_path / "late-1.0.dist-info"
    (tmp_path / "late_package/configs/late").mkdir(parents=True)
    (tmp_path / "late_package/__init__.py").touch()
    (tmp_path / "late_package/configs/late/digits.yaml").write_text("# Mine.\n")
    info.mkdir()
    (info / "METADATA").write_text("Name: late\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[selftask]\nlate = late_package\n")
    assert recipes.available().keys() - before == {"late/digits"}
    shutil.rmtree(info)
    assert recipes.available().keys() == before


def test_a_recipe_of_a_taken_name_shows_both_files(installed: Path) -> None:
    (installed / "simclr").mkdir()
    (installed / "simclr/digits.yaml").touch()
    with pytest.raises(ConfigError) as error:
        recipes.locate("simclr", None)
    ours = recipes.shipped()["simclr/digits"].path
    theirs = installed / "simclr/digits.yaml"
    assert error.value.problems == [f"{theirs}: the recipe 'simclr/digits' is taken: {ours}"]


@pytest.mark.slow
def test_installed_and_trained_by_name(tmp_path: Path) -> None:
    """In an environment of its own over this one, from an empty folder."""
    shutil.copytree(PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("*.egg-info"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    paths = [tiny.ROOT / "ssl", *map(Path, site.getsitepackages()), *_paths_of_pth_files()]
    (packages / "these.pth").write_text("".join(f"{path}\n" for path in paths))
    install = ["-m", "pip", "install", "-e", "package", "--no-deps", "--no-build-isolation"]
    done = tiny.run([python, *install], tmp_path)
    assert done.returncode == 0, done.stderr

    empty = tmp_path / "empty"
    empty.mkdir()
    selftask = [python, "-m", "selftask"]
    listed = tiny.run([*selftask, "list", "methods", "recipes"], empty).stdout
    assert "align_uniform/digits" in listed
    assert "package/src/align_uniform/method.py:" in listed
    small = ["train.max_steps=2", "train.batch_size=64", "train.threads=1", "data.num_workers=0"]
    trained = tiny.run([*selftask, "train", "align_uniform", *small], empty)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.splitlines()[-1].startswith("RUN finished: 2 steps")
    rows = tiny.rows(empty / "runs/align_uniform")
    assert {"align", "uniform", "loss"} <= rows[-2].keys()
    wrong = tiny.run([*selftask, "config", "align_uniform", "method.alhpa=1"], empty)
    assert (wrong.returncode, "did you mean 'method.alpha'?" in wrong.stderr) == (2, True)
    tests = tiny.run([python, "-m", "pytest", "-p", "no:cacheprovider"], tmp_path / "package")
    assert "3 passed" in tests.stdout, tests.stdout


def _paths_of_pth_files() -> list[Path]:
    """Folders that this environment borrows from another one."""
    files = [path for folder in site.getsitepackages() for path in Path(folder).glob("*.pth")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    return [Path(line) for line in lines if line.startswith(os.sep)]
