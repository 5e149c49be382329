"""The compiled kernel: in every wheel, and missed loudly where it is absent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tiny
from selftask.cli.env import report
from selftask.cli.main import main
from selftask.data import kernel

SOURCES = ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "LICENSE", "ssl", "configs")


def test_env_says_whether_the_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel.available():
        assert dict(report())["kernel"] == f"compiled, for {kernel.variants()[0]}"
    monkeypatch.setattr(kernel, "_augment", None)
    assert dict(report())["kernel"].startswith("absent, so that views cost")


def test_without_the_compiled_part_the_kernel_is_absent() -> None:
    """As installed without a compiler: its import fails."""
    code = (
        "import sys; sys.modules['selftask.data.kernel._augment'] = None\n"
        "from selftask.data import kernel; print(kernel.available())"
    )
    assert tiny.run([sys.executable, "-c", code], tiny.ROOT).stdout == "False\n"


def test_the_first_line_of_a_run_says_that_the_kernel_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_augment", None)
    words = tiny.command("simclr", tmp_path, "run", "train.max_steps=1")
    assert main(words[words.index("train") :]) == 0
    first = (tmp_path / "run/log.txt").read_text().splitlines()[0]
    assert "kernel: absent, so that views cost about twice the CPU time" in first


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a wheel is built from."""
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        origin = tiny.ROOT / name
        if origin.is_dir():
            shutil.copytree(
                origin, source / name, ignore=shutil.ignore_patterns("*.so", "*.egg-info")
            )
        else:
            shutil.copy(origin, source)
    return source


def _recipes(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*.yaml")}


@pytest.mark.slow
def test_an_editable_install_is_a_path_that_no_folder_hides(source: Path, tmp_path: Path) -> None:
    """A folder ``selftask`` beside a script, such as a clone, is no package, but comes first."""
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    env = {**os.environ, "CC": "false"}  # the kernel is not needed
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, env=env, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("selftask-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "parent/selftask").mkdir(parents=True)
    use = (
        "import site, sys; sys.path.insert(0, ''); site.addsitedir(sys.argv[1]); import selftask; "
        "from selftask.config.compose import recipes; print(selftask.train, recipes.folder())"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", use, str(site)],
        cwd=tmp_path / "parent",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if "-packages" in p)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith(f"{source}/configs\n"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_wheel_carries_the_kernel_or_is_not_built(source: Path, tmp_path: Path) -> None:
    """And the recipes."""

    def build(**more: str) -> int:
        words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
        env = {**os.environ, "SELFTASK_REQUIRE_KERNEL": "1", **more}
        done = subprocess.run([*words, "-w", "dist", "."], cwd=source, env=env, capture_output=True)
        return done.returncode

    assert build(CC="false") != 0
    assert build() == 0
    (wheel,) = (source / "dist").glob("selftask-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert _recipes(tmp_path / "site/selftask/configs") == _recipes(source / "configs") != set()
    use = "from selftask.data import kernel; print(kernel.__file__, kernel.variants())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    process = subprocess.run(
        [sys.executable, "-c", use], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert process.stdout.startswith(str(tmp_path / "site")), process.stderr
    assert "plain" in process.stdout
