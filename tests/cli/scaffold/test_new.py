"""What `selftask new` writes is clean, passes its own tests, trains at once and is checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tiny
from selftask.cli.main import main
from selftask.registry import HOOKS

KINDS = {"method": "my_net", "hook": "way_gone", "step": "loud", "project": "birdie"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind, in a folder that was empty."""
    folder = tmp_path_factory.mktemp("new")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind, name in KINDS.items():
            assert main(["new", kind, name]) == 0
    return folder


def test_files_and_what_they_hold(written: Path) -> None:
    actual = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    names = [name for kind, name in KINDS.items() if kind != "project"]
    flat = {f for name in names for f in (f"{name}.py", f"{name}.yaml", f"test_{name}.py")}
    assert flat <= actual
    assert {"birdie/pyproject.toml", "birdie/src/birdie/configs/birdie/digits.yaml"} <= actual
    assert not [path for path in actual if "$" in (written / path).read_text()]


@pytest.mark.parametrize("rules", [["--isolated"], ["--config", str(tiny.ROOT / "pyproject.toml")]])
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_accepts_them(written: Path, rules: list[str], command: list[str]) -> None:
    """As anyone's rules have it, and as ours do, in which selftask is no other package."""
    own = [*rules, "--ignore", "I001"] if command == ["check"] and "--config" in rules else rules
    ruff = [sys.executable, "-m", "ruff"]
    for folder in (written, written / "birdie"):
        paths = sorted(map(str, folder.glob("*.py"))) or ["."]
        done = tiny.run([*ruff, *command, *own, *paths], folder)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["method", "my_net"], "my_net.py, my_net.yaml, test_my_net.py: there already"),
        (["method", "simclr"], "there is a method 'simclr' already, at "),
        (["hook", "torch"], "'torch' is the name of an installed module"),
        (["hook", "ssl"], "'ssl' is the name of an installed module"),
        (["hook", "My-Net"], "such as 'my_net'"),
        (["hook", "class"], "'class': expected a name of small letters"),
        (["metod", "mine"], "there is no kind 'metod'; did you mean 'method'?"),
        (["method"], "new needs a kind and a NAME"),
    ],
)
def test_taken_and_invalid_names_are_refused(
    argv: list[str],
    message: str,
    written: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(written)
    before = (written / "my_net.py").read_text()
    assert main(["new", *argv]) == 2
    assert message in capsys.readouterr().err
    assert (written / "my_net.py").read_text() == before
    assert "way_gone" not in HOOKS


@pytest.mark.slow
def test_their_own_tests_pass(written: Path) -> None:
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    names = [f"test_{name}.py" for kind, name in KINDS.items() if kind != "project"]
    done = tiny.run([*pytest_here, *names], written)
    assert done.returncode == 0, done.stdout
    done = tiny.run(pytest_here, written / "birdie")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_types_are_right(written: Path) -> None:
    names = [f"{name}.py" for kind, name in KINDS.items() if kind != "project"]
    words = [sys.executable, "-m", "mypy", "--config-file", str(tiny.ROOT / "pyproject.toml")]
    done = tiny.run([*words, *names, *(f"test_{name}" for name in names)], written)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_command_trains_and_checks_it(written: Path) -> None:
    selftask = [sys.executable, "-m", "selftask"]
    done = tiny.run([*selftask, "train", "my_net.yaml", "train.max_steps=2"], written)
    assert "RUN finished: 2 steps" in done.stdout, done.stderr
    of_terms = ["train", "dino", "import=[loud]", "train.step=loud", "train.max_steps=1"]
    done = tiny.run([*selftask, *of_terms, "eval.evaluations=null"], written)
    assert "RUN finished: 1 step " in done.stdout, done.stderr
    words = ["check", "my_net", "import=[my_net]", "--ranks", "1,2"]
    done = tiny.run([*selftask, *words], written)
    assert "SAME: my_net on 2 ranks does what it does on one" in done.stdout, done.stdout
