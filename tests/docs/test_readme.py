"""The commands of the README do what it says: each is run, shortened, in a folder like a user's."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny
from selftask.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = ("train.max_steps=2", "train.batch_size=8", "train.threads=1", "data.num_workers=0")


def commands() -> list[str]:
    """Every line of a ``sh`` block that begins with ``selftask``, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("selftask ")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images that the README speaks of."""
    home = tmp_path_factory.mktemp("readme")
    draw = np.random.default_rng(0)
    for folder in ("my_images", "labeled/train", "labeled/test", "cifar10/train", "cifar10/test"):
        for label in ("cat", "dog"):
            (home / folder / label).mkdir(parents=True)
            for number in range(11):  # more than the 20 neighbors of k-NN
                pixels = draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(home / folder / label / f"{number}.png")
    return home


def shortened(command: str) -> list[str]:
    """The command's words, with settings that make it a matter of seconds."""
    words = shlex.split(command)[1:]
    if words[0] in ("train", "finetune"):
        words += SHORT if any(word.startswith("data") for word in words) else ("train.max_steps=2",)
    if words[0] == "plan":
        words += SHORT[1:2]  # there are few images
    if any(word.startswith(("timm:", "torchvision:")) for word in words):
        words.append("weights=none")  # no network in tests
    return words


@pytest.mark.slow
def test_the_commands_of_the_readme_run(home: Path) -> None:
    actual = commands()
    assert len(actual) >= 9
    environment = os.environ | {"PYTHONPATH": str(ROOT / "ssl"), "OMP_NUM_THREADS": "1"}
    for command in actual:
        done = subprocess.run(
            [sys.executable, "-m", "selftask", *shortened(command)],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 170


def test_the_readme_lists_every_method() -> None:
    (listed,) = re.findall(r"method_tables.py -->\n(.*?)<!-- end", README, re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == METHODS.names()


@pytest.mark.slow
def test_the_python_of_the_readme_runs(home: Path, tmp_path: Path) -> None:
    """Two steps instead of a whole training."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "load(" in b]
    short = ", ".join(f"{key!r}: {value}" for key, value in (word.split("=") for word in SHORT))
    assert block.count('out="runs/mine")') == 1
    code = block.replace('out="runs/mine")', f'out="runs/mine", **{{{short}}})')
    shutil.copytree(home / "my_images", tmp_path / "my_images")
    done = tiny.run([sys.executable, "-c", f"{code}\nprint(tuple(features.shape))"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(2, 512)"


def test_the_step_of_the_readme_is_the_step() -> None:
    """The README's step is the real one without its docstring, comments included."""
    block = next(
        b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "def stand" in b
    )
    source = (ROOT / "ssl/selftask/train_steps/standard.py").read_text(encoding="utf-8")
    place = 0
    for line in filter(None, map(str.strip, block.splitlines())):
        place = source.find(line, place)
        assert place >= 0, f"not in train_steps/standard.py, or not there: {line}"
    (shown,), (real,) = (
        [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        for text in (block, source)
    )
    del real.body[0]  # the docstring
    assert ast.unparse(shown) == ast.unparse(real)


def test_the_typos_of_the_readme_are_answered_so() -> None:
    command, *errors = re.search(r"```\n\$ (selftask .*?)```", README, re.DOTALL)[1].splitlines()  # type: ignore[index]
    done = subprocess.run(
        [sys.executable, "-m", "selftask", *shlex.split(command)[1:]],
        env=os.environ | {"PYTHONPATH": str(ROOT / "ssl")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    for line in errors:
        for part in line.split("(...)"):
            assert part.strip() in done.stderr
