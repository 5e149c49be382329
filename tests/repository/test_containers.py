"""docker/: what the image copies exists and is enough to install selftask from.

No engine builds the image here. The definition of Apptainer must install the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tiny
from selftask.cli.main import COMMANDS

DOCKER = tiny.ROOT / "docker"


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments, continued lines joined."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(kept).replace("\\\n", " ")
    words = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in words]


FILE = instructions((DOCKER / "Dockerfile").read_text(encoding="utf-8"))
DEFINITION = (DOCKER / "selftask.def").read_text(encoding="utf-8")


def copied() -> list[str]:
    """The files and folders that the image takes from the checkout."""
    lines = [rest.split() for name, rest in FILE if name == "COPY" and "--from" not in rest]
    return [source for words in lines for source in words[:-1]]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    assert copied() and all((tiny.ROOT / name).exists() for name in copied())
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    assert {name[1:] for name in ignored if name.startswith("!")} == set(copied())
    assert set(re.findall(r"^    (\S+) /source/\S+$", DEFINITION, re.M)) == set(copied())


def test_the_image_runs_selftask_without_rights() -> None:
    last = [name for name, _ in FILE if name in ("USER", "ENTRYPOINT")]
    assert last == ["USER", "ENTRYPOINT"]
    assert ("USER", "10001") in FILE and ("ENTRYPOINT", '["selftask"]') in FILE
    (extras,) = re.findall(r'EXTRAS="(.+)"', (DOCKER / "Dockerfile").read_text())
    assert f'".[{extras}]"' in DEFINITION
    base = re.search(r"ARG BASE=(\S+)", (DOCKER / "Dockerfile").read_text())
    assert base is not None and f"From: {base[1]}\n" in DEFINITION


def test_commands_of_the_page() -> None:
    page = (tiny.ROOT / "docs/containers.md").read_text(encoding="utf-8").replace("\\\n", " ")
    matches = re.findall(r"selftask(?:\.sif)? +(?:selftask )?([a-z]+) +\w+(?:/\w+)? +data=", page)
    assert set(matches) == {"train"} and set(matches) < set(COMMANDS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_copied_files_are_enough(tmp_path: Path) -> None:
    """As the image's pip does: a wheel with kernel and recipes, from the copied files only."""
    source = tmp_path / "source"
    source.mkdir()
    unwanted = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in copied():
        if (tiny.ROOT / name).is_dir():
            shutil.copytree(tiny.ROOT / name, source / name, ignore=unwanted)
        else:
            shutil.copy(tiny.ROOT / name, source)
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*words, "-w", "dist", "."],
        cwd=source,
        env={**os.environ, "SELFTASK_REQUIRE_KERNEL": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(re.fullmatch(r"selftask/data/kernel/_augment\..*so", name) for name in names)
    inside = {name for name in names if not name.endswith(("/", ".so"))}
    package = {p.relative_to(tiny.ROOT / "ssl").as_posix() for p in _sources("ssl", "*.py")}
    recipes = {f"selftask/{p.relative_to(tiny.ROOT).as_posix()}" for p in _sources("configs", "*")}
    assert package <= inside and recipes <= inside


def _sources(folder: str, pattern: str) -> list[Path]:
    return [path for path in (tiny.ROOT / folder).rglob(pattern) if path.is_file()]
