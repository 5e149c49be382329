"""The end of the process: quick after torch has been imported, and with nothing lost."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from selftask import __main__ as entry
from selftask.cli.main import main

SCRIPT = """
import atexit, sys, threading, time, types
from selftask import __main__ as entry

class Freed:
    def __del__(self):
        print("freed")

def thread():
    time.sleep(0.1)
    print("thread")

def main():
    sys.modules["torch"] = types.ModuleType("torch")  # the real one takes seconds to import
    sys.modules["torch"].thing = Freed()
    threading.Thread(target=thread).start()
    entry.file = open("never_closed.txt", "w")
    entry.file.write("text")
    print("last line")
    return 3

atexit.register(print, "exit handler")
entry.main = main
entry.run()
"""


def run(folder: Path, *options: str, **streams: int) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    env.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        [sys.executable, *options, "script.py"],
        cwd=folder,
        env=env,
        text=True,
        timeout=60,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams),
    )


def test_modules_are_not_freed_but_threads_handlers_and_files_end_as_usual(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n") == ["last line", "thread", "exit handler", ""]
    assert (tmp_path / "never_closed.txt").read_text() == "text"


def test_profiler_prints_its_table(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "cProfile")
    assert "function calls" in done.stdout
    assert "freed" in done.stdout


def test_interactive_interpreter_stays(tmp_path: Path) -> None:
    done = run(tmp_path, "-i", stdin=subprocess.DEVNULL)
    assert "freed" in done.stdout


def test_reader_that_has_exited_is_no_traceback(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(tmp_path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's device without space")
def test_output_without_space_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "wb", buffering=0) as full, io.TextIOWrapper(full) as stream:
        stream.reconfigure(write_through=True)
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["list", "methods"]) == 2
    message = "error: no space left on device: the output or a file could not be written\n"
    assert capsys.readouterr().err == message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's device without space")
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run(tmp_path, stdout=full.fileno())
    assert done.returncode == 3
    assert done.stderr == "error: the output could not be written: No space left on device\n"


def test_called_by_other_code_only_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "main", lambda: 4)
    monkeypatch.setattr(entry, "_exit_without_freeing", lambda code: pytest.fail("process ended"))
    assert "torch" in sys.modules
    with pytest.raises(SystemExit) as stop:
        entry.run()
    assert stop.value.code == 4
