"""``launch.snapshot``: a job imports the code as it was when it was submitted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from submit_words import CLUSTER, Fake, words

from selftask.errors import UserError
from selftask.slurm import code_snapshot
from selftask.slurm.code_snapshot import CodeSnapshot
from selftask.slurm.plan import plan


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a module that is tracked, one that is new, and one that is ignored."""
    folder = tmp_path / "work"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "mine.py").write_text("VALUE = 1\n")
    (folder / ".gitignore").write_text("ignored.py\nruns/\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "add", "."], check=True)
    for name in ("new.py", "ignored.py"):
        (folder / name).write_text("VALUE = 2\n")
    monkeypatch.chdir(folder)
    return folder


def test_copies_what_git_does_not_ignore_as_it_is_now(repository: Path) -> None:
    (repository / "package" / "mine.py").write_text("VALUE = 3\n")
    snapshot = CodeSnapshot.of(repository / "runs" / "code")
    snapshot.copy()
    copied = sorted(p.relative_to(snapshot.folder) for p in snapshot.folder.rglob("*.py"))
    assert copied == [Path("new.py"), Path("package/mine.py")]
    assert (snapshot.folder / "package" / "mine.py").read_text() == "VALUE = 3\n"
    snapshot.copy()
    assert snapshot.path_of_copy(repository / "package") == snapshot.folder / "package"
    assert snapshot.path_of_copy(Path("/elsewhere")) == Path("/elsewhere")


def test_submodules_and_names_that_are_not_utf8(repository: Path, tmp_path: Path) -> None:
    module = repository / "module"
    (module / "inside").mkdir(parents=True)
    (module / "inside" / "lib.py").touch()
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        own = ("-c", "user.name=x", "-c", "user.email=x")
        subprocess.run(["git", "-C", str(module), *own, *command], check=True)
    subprocess.run(["git", "-C", str(repository), "add", "module"], check=True)
    (module / "new.py").touch()
    subprocess.run(["git", "init", "-q", str(repository / "untracked")], check=True)
    odd = os.fsdecode(b"caf\xe9.txt")
    (repository / odd).touch()
    snapshot = CodeSnapshot.of(tmp_path / "code")
    snapshot.copy()
    copied = {p.relative_to(snapshot.folder).as_posix() for p in snapshot.folder.rglob("*.*")}
    assert {odd, "module/inside/lib.py", "module/new.py"} <= copied
    assert not (snapshot.folder / "untracked").exists()


def test_links_and_runs_that_git_does_not_ignore(repository: Path, tmp_path: Path) -> None:
    (repository / ".gitignore").write_text("")
    (tmp_path / "elsewhere.txt").touch()
    links = {"linked.py": "new.py", "linked": "package", "list.txt": "../elsewhere.txt"}
    for name, target in links.items():
        (repository / name).symlink_to(target)
    for name in ("first", "second", "second"):
        snapshot = CodeSnapshot.of(repository / "runs" / name / "code")
        snapshot.copy()
    assert (snapshot.folder / "linked.py").resolve() == snapshot.folder / "new.py"
    assert (snapshot.folder / "linked").resolve() == snapshot.folder / "package"
    assert (snapshot.folder / "list.txt").resolve() == tmp_path / "elsewhere.txt"
    assert not (snapshot.folder / "runs").exists(), "the other snapshots"


def test_jobs_import_from_the_copy(repository: Path, fake: Fake) -> None:
    given = words(repository.parent, "run", *CLUSTER, "launch.snapshot=true")
    planned = plan("simclr/digits", given)
    (submission,) = planned.submissions
    code = planned.out.absolute() / "slurm" / "code"
    assert submission.modules == [str(code)]
    assert submission.folder == str(repository), "relative paths of data stay as they were"
    assert not code.exists(), "a dry run copies nothing"


def test_snapshots_too_large_or_outside_git_are_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_snapshot, "MAX_MB", 1e-6)
    with pytest.raises(UserError, match="add data and runs to"):
        CodeSnapshot.of(repository / "runs" / "code").copy()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="submit from inside a git repository"):
        CodeSnapshot.of(tmp_path / "code")
