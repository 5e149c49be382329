"""Files that are replaced atomically, by processes of which one was killed."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tiny
from run_folders import write_run
from selftask.cli.main import main
from selftask.files import paths
from selftask.files.replace import replacing, write_durably

KILLED = """
import os, signal, sys
from pathlib import Path
from selftask.files.replace import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half a page")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """A SIGKILL while a report is written left its temporary file for ever."""
    run = write_run(tmp_path / "run[1]")
    page = run / "report.html"
    subprocess.run([sys.executable, "-c", KILLED, str(page)], env=tiny.environment(), check=False)
    (left,) = run.glob(".report.html.*")
    assert left.read_text() == "half a page"
    assert main(["report", str(run), "images=false"]) == 0
    assert page.exists() and not list(run.glob(".report.html.*"))


def test_files_of_processes_that_may_run_stay(tmp_path: Path) -> None:
    names = {
        f".a.{socket.gethostname()}.{os.getppid()}-{os.getppid()}.tmp": 0.0,  # runs here
        ".a.elsewhere.4194000.tmp": 600.0,  # may run there
        ".a.tmp": 1e6,  # of something else
        ".ab.elsewhere.4194000.tmp": 1e6,  # of another file
    }
    old = ".a.elsewhere.4194001.tmp"
    for name, age_s in {**names, old: 1e6}.items():
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "a").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"a", *names}


def test_threads_may_replace_the_same_file(tmp_path: Path) -> None:
    """The watchdog writes a status while the main thread may do so, too."""
    path = tmp_path / "status.json"

    def write(text: str) -> None:
        with replacing(path) as temporary:
            temporary.write_text(text)

    with replacing(path) as temporary:
        temporary.write_text("of this thread")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write, "of the other").result()
        assert path.read_text() == "of the other"
    assert path.read_text() == "of this thread"
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise ValueError

    with pytest.raises(ValueError):
        write(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "config.yaml"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as raised:
        write_durably(path, "half")
    assert paths.explain(raised.value) == f"{path}: no space left on device"
    assert str(path) in str(raised.value)
    assert not list(tmp_path.iterdir())
