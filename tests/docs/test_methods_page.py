"""The methods of the docs work, as someone would type files and commands in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/methods.md", "docs/method-examples.md")
PAGE = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
FILES = {name: text for text, name in re.findall(r"```\w+\n(# (\S+)\n.*?)```", PAGE, re.DOTALL)}
METHODS = (
    *("smallest", "my_nnclr", "slow", "painter", "gram", "tokens"),
    *("steady", "my_rotation", "uniform_critic"),
)
MORE = ("adversarial.py",)  # a train step
LONGEST = 60  # lines of a method's file


def _commands(method: str) -> list[str]:
    lines = re.findall(r"^selftask .*$", PAGE, re.MULTILINE)
    return [line for line in lines if f" {method}.yaml" in line]


def test_every_block_is_one_of_the_files_that_run() -> None:
    files = [f"{m}.{kind}" for m in METHODS for kind in ("py", "yaml")]
    assert sorted(FILES) == sorted([*files, *MORE])
    blocks = re.findall(r"```(?:python|yaml)\n", PAGE)
    assert len(blocks) == len(FILES)
    assert {name for name, text in FILES.items() if text.count("\n") > LONGEST} == set()


def _write_clips(folder: Path) -> None:
    """Write four clips of seven frames."""
    for clip in range(4):
        (folder / f"clips/{clip}").mkdir(parents=True)
        for frame in range(7):
            image = Image.new("RGB", (40, 40), (60 * clip, 30 * frame, 90))
            image.save(folder / f"clips/{clip}/frame_{frame}.png")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_commands_of_the_page_run(method: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    _write_clips(tmp_path)
    commands = _commands(method)
    assert any(" check " in command for command in commands)
    assert any(" train " in command for command in commands)
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] == "train":
            words += ["train.max_steps=2", "eval.evaluations={}", "train.threads=1"]
        done = subprocess.run(
            [sys.executable, "-m", "selftask", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT / "ssl"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        named = re.search(r"method=(\w+)", command)
        same = f"SAME: {named[1] if named else method}"
        wanted = same if words[0] == "check" else "RUN finished: 2 steps"
        assert wanted in done.stdout, command
