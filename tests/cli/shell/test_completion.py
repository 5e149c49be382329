"""Completion: what the words may become, and that a real bash puts it on the line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from selftask.cli.main import COMMANDS, main
from selftask.cli.shell.candidates import candidates
from selftask.config.load import load_config
from selftask.registry import HOOKS, OPTIMIZERS


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a run, a recipe, some images."""
    for name in ("runs/one", "runs/two", "images/cat"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/one/config.yaml").write_text("recipe: simclr\n")
    (tmp_path / "mine.yaml").write_text("method: simclr\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("selftask tra", ["train"]),
        ("selftask train simclr/dig", ["simclr/digits"]),
        ("selftask train min", ["mine.yaml"]),
        ("selftask train simclr opti", ["optimizer=", "optimizer.", "optimizers="]),
        ("selftask train simclr optimizer=sg", ["optimizer=sgd"]),
        ("selftask train simclr optimizer.lr", ["optimizer.lr=", "optimizer.lr."]),
        ("selftask train simclr optimizer=sgd optimizer.nest", ["optimizer.nesterov="]),
        ("selftask train simclr optimizer.nest", []),
        ("selftask train simclr method.temp", ["method.temperature="]),
        ("selftask train moco/digits method.mom", ["method.momentum="]),
        ("selftask train simclr train.precision=b", ["train.precision=bfloat16"]),
        ("selftask train simclr train.compile=f", ["train.compile=false"]),
        ("selftask train simclr hooks.ema.dec", ["hooks.ema.decay="]),
        ("selftask train simclr data=im", ["data=images/"]),
        ("selftask train simclr nothing.", []),
        ("selftask train --qu", ["--quiet"]),
        ("selftask list hoo", ["hooks"]),
        ("selftask help exp", ["export", "explain"]),
        ("selftask data sh", ["show"]),
        ("selftask eval kn", ["knn"]),
        ("selftask eval su", ["suite"]),
        ("selftask eval knn runs/", ["runs/one", "runs/two/"]),
        ("selftask eval knn timm", ["timm:"]),
        ("selftask export runs/o", ["runs/one"]),
        ("selftask completion z", ["zsh"]),
        ("selftask nothing a", []),
    ],
)
@pytest.mark.usefixtures("here")
def test_candidates(line: str, expected: list[str]) -> None:
    assert candidates(line) == expected


def test_names_are_those_of_the_registries() -> None:
    assert candidates("selftask train simclr optimizer=") == [
        f"optimizer={name}" for name in OPTIMIZERS.names()
    ]
    offered = candidates("selftask train simclr hooks.")
    assert {word.rstrip(".=") for word in offered} == {f"hooks.{name}" for name in HOOKS.names()}
    assert set(candidates("selftask ")) == {*COMMANDS, "help"}


def test_every_key_of_a_config_is_offered() -> None:
    """Each key of the resolved config, but for those inside lists and free mappings."""

    def check(section: dict[str, object], prefix: str) -> None:
        offered = {
            word.rstrip(".=") for word in candidates(f"selftask train simclr {words}{prefix}")
        }
        for name, value in section.items():
            if name in ("name", "recipe", "views") or prefix == "hooks.":
                continue
            assert f"{prefix}{name}" in offered
            if isinstance(value, dict) and value and f"{prefix}{name}" not in free:
                check(value, f"{prefix}{name}.")

    words = "data=digits optimizer=adamw backbone=small_resnet "
    free = {"data.val", "launch.slurm", "data.val_sets"}
    check(load_config("simclr", []).to_dict(), "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("selftask tra", "selftask train "),
        ("selftask train simclr optimizer=muo", "selftask train simclr optimizer=muon "),
        ("selftask train simclr optimizer.layer", "selftask train simclr optimizer.layer_decay="),
        ("selftask eval knn timm", "selftask eval knn timm:"),
        ("selftask eval knn runs/o", "selftask eval knn runs/one "),
    ],
)
def test_bash_completes(line: str, expected: str, here: Path) -> None:
    """COMP_WORDS as bash itself splits them: at ``=`` and ``:``, too."""
    (here / "bin").mkdir()
    command = here / "bin/selftask"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m selftask "$@"\n')
    command.chmod(0o755)
    script = r"""
eval "$(selftask completion bash)"
COMP_LINE="$1" COMP_POINT=${#1}
_selftask selftask
last="${1##*[=: ]}"
printf '%s' "${1%"$last"}${COMPREPLY[*]}"
"""
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    done = tiny.run(["bash", "-c", script, "-", line], here, PATH=path)
    assert (done.stdout, done.stderr) == (expected, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_is_registered_and_valid() -> None:
    code = 'eval "$1"; complete -p selftask'
    script = subprocess.run(
        [sys.executable, "-m", "selftask", "completion", "bash"],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    done = subprocess.run(
        ["bash", "-c", code, "-", script], capture_output=True, text=True, check=True
    )
    assert "-F _selftask selftask" in done.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True)


def test_an_answer_imports_what_is_quick_to_import() -> None:
    """An answer should take less than 300 ms."""
    words = [sys.executable, "-X", "importtime", "-m", "selftask", "completion", "--line"]
    done = tiny.run([*words, "selftask train simclr optimizer."], Path.cwd())
    assert "optimizer.schedule=" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "hydra", "numpy", "rich"}


def test_unknown_and_missing_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err
    assert main(["completion"]) == 2
