"""The command line's shell: dispatch, help, messages, and that all of it is light."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from selftask.cli import env
from selftask.cli.main import COMMANDS, GROUPS, main
from selftask.registry import REGISTRIES


def run(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """``python -m selftask`` in a process of its own."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, *options, "-m", "selftask", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_costs_nothing() -> None:
    costs = []
    for _ in range(3):  # a busy machine makes any one of them dear
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert done.stderr == ""
    assert all(f"\n  {command} " in done.stdout for command in COMMANDS)
    assert min(costs) < 0.3, "CPU seconds"


def test_every_command_has_one_group() -> None:
    names = [name for names in GROUPS.values() for name in names]
    assert len(names) == len(set(names))
    assert set(COMMANDS) <= set(names)


def test_does_not_import_torch() -> None:
    """Nor the entry point; for other commands see test_startup.py."""
    done = run("config", "simclr", options=("-X", "importtime"))
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "selftask.cli.main" in imported
    assert not imported & {"torch", "torchvision", "sklearn", "timm"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"selftask {version('selftask')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "error: there is no command 'trian'; did you mean 'train'?"),
        (["list", "hook"], "error: there is no kind 'hook'; did you mean 'hooks'?"),
        (["env", "now"], "error: env takes no arguments, got 'now'"),
        (["config"], "error: config needs a RECIPE before any key=value"),
        (["config", "train.epochs=3"], "error: config needs a RECIPE before any key=value"),
    ],
)
def test_unknown_commands_and_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.out == ""


@pytest.mark.parametrize("command", ["config", "list", "env"])
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: selftask {command}")
    assert main(["help", command]) == 0
    assert capsys.readouterr().out == text


def test_help_of_a_command_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "data", "check"]) == 0
    assert capsys.readouterr().out.startswith("usage: selftask data check")
    assert main(["help", "trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_a_folder_of_a_run_may_have_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    for command in ("test lr=1", "test lr=1@3", "repro lr=1", "replay lr=1", "eval knn lr=1"):
        assert main(command.split()) == 2
        assert "usage:" not in capsys.readouterr().err


def test_list_fits_on_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    words = {word.strip(",") for line in lines for word in line.split()}
    assert words >= {name for registry in REGISTRIES.values() for name in registry}


def test_list_of_hooks_is_in_the_order_of_their_folders(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list", "hooks"]) == 0
    text = capsys.readouterr().out
    averages = text[text.index("\n  Averages of the weights\n") :]
    assert "\n  ema " in averages
    assert "\n  checkpoint " in text and "\n  checkpoint " not in averages


def test_list_names_everything_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *REGISTRIES]) == 0
    text = capsys.readouterr().out
    for kind, registry in REGISTRIES.items():
        assert f"{kind}:\n" in text
        for name in registry:
            assert registry.summary(name) in text
            assert f"{registry.address(name).path.name}:{registry.address(name).line}]" in text


def test_list_and_explain_know_parts_of_ones_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    forget_names: None,
) -> None:
    (tmp_path / "own_parts.py").write_text(
        "from selftask.hooks.base import Hook\n"
        "from selftask.registry import register_hook\n"
        "@register_hook('own_hook')\n"
        "class OwnHook(Hook):\n"
        '    "Does what I want."\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(["list", "hooks", "import=[own_parts]"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("  own_hook "))
    assert line.endswith("  [own_parts.py:3]")
    assert main(["explain", "own_hook", "import=[own_parts]"]) == 0
    assert capsys.readouterr().out.startswith("own_hook: hook [own_parts.py:3]\n    Does what I")
    assert main(["list", "hooks", "import=[absent_parts]"]) == 2
    assert "absent_parts" in capsys.readouterr().err


def test_list_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "recipes"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("recipes:\n  ")
    assert "simclr/digits" in text
    assert "\nmethods:" not in text


def test_env_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    topics = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"selftask", "python", "cores", "torch", "precision", "collectives"} <= topics


def test_env_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what a missing module looks like
    monkeypatch.setattr(env, "installed_version", lambda name: None)
    report = dict(env.report())
    assert report["devices"].startswith("unknown: torch cannot be imported")
    assert report["torch"] == "MISSING, and required"


def test_a_reader_that_leaves_is_no_error() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    command = f"{sys.executable} -m selftask list | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("recipes ")
    assert done.stderr == ""


def test_python_without_asserts_is_refused() -> None:
    """Hydra's parser failed with a traceback at the first value in braces."""
    done = run("config", "simclr", "train={max_steps: 3}", options=("-O",))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: python -O (PYTHONOPTIMIZE) removes assert statements")


def test_as_a_module_from_the_root_python_keeps_its_ssl() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "import ssl; print(ssl.OPENSSL_VERSION)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
