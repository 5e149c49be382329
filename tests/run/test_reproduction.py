"""Expected results, the environment that a run records, and what ``selftask repro`` says of it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import tiny
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.report import header
from selftask.run import environment, reproduction


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny.digits_file(tmp_path, "val.npz", 400, 430)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(folder: Path, *more: str) -> int:
    words = ["data.val=val.npz", "eval.evaluations={knn: {}}", "train.max_steps=2", *more]
    return main(["train", "simclr/digits", *tiny.overrides("simclr", folder, "run", *words)])


def test_versions_are_those_of_the_packages_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a name on the search path; a removal that was interrupted leaves no name."""
    files = {
        "first/odd_name-1.5.dist-info/METADATA": "Name: Odd.Name\nVersion: 1.5\n\nName: readme\n",
        "first/gone-1.0.dist-info/RECORD": "",
        "second/odd_name-2.0.dist-info/METADATA": "Name: Odd.Name\nVersion: 2.0\n",
        "second/old.egg-info/PKG-INFO": "Metadata-Version: 1.0\nName: old\nVersion: 0.1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert environment._packages() == {"Odd.Name": "1.5", "old": "0.1"}


def test_a_run_that_misses_what_it_promises_has_failed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, "expected={knn_top1: [1.5, 2], los: [0, 9]}") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("RUN FAILED at step 2 on rank 0: knn_top1 is 0.")
    assert "expected 1.5 to 2 (command line: expected=" in lines[-1]
    assert "no row of this run has 'los', which is expected; did you mean 'loss'?" in lines[-1]
    status = tiny.status(folder / "run")
    assert (status["state"], status["step"]) == ("failed", 2)
    assert (folder / "run/export/backbone.pt").exists()

    assert train(folder, "expected={knn_top1: [-2, -1]}") == 1, "no step is left, and still"
    assert "expected -2 to -1 (command line" in capsys.readouterr().out.splitlines()[-1]
    assert train(folder, "expected={knn_top1: [0, 1], loss: [0, 100]}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("expected: knn_top1 is 0." in line for line in lines)
    assert lines[-1].startswith("RUN finished: 2 steps")
    assert tiny.status(folder / "run")["state"] == "finished"


def test_a_range_begins_with_its_lowest_value() -> None:
    with pytest.raises(ConfigError, match=r"knn_top1=\[0.7, 0.6\]: the lowest value comes first"):
        load_config("simclr", ["expected.knn_top1=[0.7,0.6]"])
    text = yaml.safe_dump(load_config("simclr", ["expected.knn_top1=[0.6,0.7]"]).to_dict())
    assert yaml.safe_load(text)["expected"] == {"knn_top1": [0.6, 0.7]}


def git(*words: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@here"]
    done = subprocess.run(["git", *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_it_is_unknown_what_a_slow_git_did_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"status": None}
    monkeypatch.setattr(environment, "_git", lambda *words, **_: answers.get(words[0], "abc"))
    facts = environment.describe()
    assert facts["git"]["dirty"] is None
    lines = [line for line in reproduction._code(facts, facts) if "not known" in line]
    assert len(lines) == 2
    record = SimpleNamespace(environment=facts)
    assert ("git", "abc on abc, uncommitted changes unknown") in [*header._code(record)]


def test_what_a_run_records_and_what_differs_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    git("init", "-q")
    (folder / "mine.py").write_text("x = 1\n\n")
    git("add", "mine.py")
    git("commit", "-qm", "mine")
    (folder / "mine.py").write_text("x = 2\n\n")  # the diff ends with an empty line
    words = tiny.overrides("simclr", folder, "run", "train.max_steps=1")
    monkeypatch.setattr("sys.argv", ["selftask", "train", "simclr/digits", *words])
    assert train(folder, "train.max_steps=1") == 0
    path = folder / "run/environment.json"
    content = json.loads(path.read_text())
    commit = git("rev-parse", "HEAD")
    assert content["git"]["commit"] == commit
    assert content["git"]["dirty"]
    assert "-x = 1\n+x = 2" in (folder / "run" / content["git"]["diff"]).read_text()
    assert content["packages"]["torch"]
    assert content["packages"]["pytest"] == pytest.__version__
    versions = {name: importlib.metadata.version(name) for name in content["packages"]}
    assert content["packages"] == versions
    assert content["command"][1] == "train"
    assert content["cpu"]

    content["packages"]["torch"] = "1.0"
    content["command"].append("method.temperature=0.3")
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["repro", "run"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  torch: 1.0 there, ") for line in printed)
    assert "machine: the same" in printed
    assert "  git: there were uncommitted changes there, see git.diff" in printed
    assert "  method.temperature: 0.15 there, 0.3 now" in printed
    assert printed[-4:] == [
        f"  cd {folder}",
        f"  git checkout {commit}",
        f"  git -C {folder} apply {folder}/run/git.diff",
        f"  selftask train {folder}/run/config.yaml out={folder}/run_again",
    ]
    git("checkout", "-q", "mine.py")
    subprocess.run(["git", "apply", f"{folder}/run/git.diff"], check=True)
    assert (folder / "mine.py").read_text() == "x = 2\n\n"


def repeated_config(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str
) -> list[str]:
    """Return what ``repro`` prints of the config of a run that ``argv`` began."""
    monkeypatch.setattr("sys.argv", ["selftask", *argv])
    assert main(list(argv)) == 0
    capsys.readouterr()
    main(["repro", str(folder / "run")])
    printed = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(printed) if line.startswith("config:"))
    return printed[start : printed.index("to repeat it:")]


def test_the_chosen_precision_and_options_are_no_difference(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tiny.overrides("simclr", folder, "run", "train.max_steps=1", "train.precision=auto")
    argv = ["train", "--quiet", "simclr/digits", *words]
    assert repeated_config(folder, capsys, monkeypatch, *argv) == ["config: the same"]
    assert yaml.safe_load((folder / "run/config.yaml").read_text())["train"]["precision"] != "auto"


def test_repro_says_that_a_fine_tuned_config_was_not_compared(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "simclr/digits", *tiny.overrides("simclr", folder, "start")]) == 0
    words = ["data=digits", "train.max_steps=1", "eval.every=null", "data.num_workers=0", "out=run"]
    printed = repeated_config(folder, capsys, monkeypatch, "finetune", "start", *words)
    expected = "config: not compared; the run was not started by `selftask train RECIPE`"
    assert printed == [expected]


def test_a_long_diff_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "-q")
    (folder / "mine.py").write_text("x = 1\n")
    git("add", "mine.py")
    git("commit", "-qm", "mine")
    (folder / "mine.py").write_text("y = 'ü'\n" * 5000)
    monkeypatch.setattr(environment, "MAX_DIFF", 1001)
    environment.write(folder)
    assert 900 < (folder / "git.diff").stat().st_size <= 1003
    git("checkout", "-q", "mine.py")
    environment.write(folder)
    assert not (folder / "git.diff").exists()


def test_repro_of_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repro", "nothing"]) == 2
    assert "error: nothing: no run, or one that never began" in capsys.readouterr().err
