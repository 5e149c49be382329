"""The parent of local ranks says how a run ended where no rank could: the ranks are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from selftask.config.load import load_config
from selftask.errors import UserError
from selftask.run import local_ranks
from selftask.run.local_ranks import Ranks, own_command, start, starts_ranks
from selftask.run.status import Status

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def launch(out: Path, code: str, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit code of two ranks that run ``code``, and what status.json says then."""
    config = load_config("simclr", [f"out={out}", "launch.processes=2", *more])
    exit_code = start(config, [sys.executable, "-c", code])
    return exit_code, Status(config).read()


@pytest.mark.parametrize("earlier", [None, "interrupted", "finished", "running"])
def test_ranks_that_die_before_they_begin(
    tmp_path: Path, earlier: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier run in the folder left behind is not taken for theirs."""
    out = tmp_path / "run"
    if earlier is not None:
        out.mkdir()
        Status(load_config("simclr", [f"out={out}"])).write(earlier)
    code, status = launch(out, KILLED)
    assert code == 137
    assert status["state"] == "failed"
    assert "was killed by SIGKILL" in status["error"]
    assert "RUN FAILED on rank" in capsys.readouterr().out.splitlines()[-1]


def test_they_are_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = launch(tmp_path / "run", KILLED, "launch.max_restarts=1")
    assert code == 137
    assert "restart 1 of 1" in capsys.readouterr().out


def test_a_signal_while_the_ranks_start_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def start_and_signal(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        if options["env"]["RANK"] == "0":
            signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    ranks = Ranks([sys.executable, "-c", "import time; time.sleep(60)"], 2)
    assert ranks.wait() == 128 + signal.SIGTERM
    assert [process.returncode for process in ranks.processes] == [-signal.SIGTERM] * 2


LISTENS = """
import os, socket, sys
if os.environ["RANK"] == "0":
    server = socket.socket(fileno=int(os.environ["SELFTASK_LISTEN_FD"]))
    server.accept()[0].sendall(b"rank 0")
else:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    sys.exit(socket.create_connection(address, timeout=30).recv(6) != b"rank 0")
"""


def test_the_port_of_rank_0_is_open_before_the_ranks_start() -> None:
    """Otherwise another process could take it while rank 0 imports torch."""
    ranks = Ranks([sys.executable, "-c", LISTENS], 2)
    assert ranks.wait() == 0


@pytest.mark.parametrize(("out", "has_time"), [("run", False), ("memory://run", True)])
def test_rank_0_has_time_to_upload_its_last_checkpoint(
    out: str, has_time: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has ended by then, with the code of a signal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path))
    monkeypatch.setattr(local_ranks, "GRACE_S", 0.2)
    monkeypatch.setattr(local_ranks, "upload_files", lambda *_: None)
    rank_0 = "(time.sleep(2), open('uploaded', 'w')) if os.environ['RANK'] == '0' else None"
    code = f"import os, sys, time; {rank_0}; sys.exit(143)"
    config = load_config("simclr", [f"out={out}", "launch.processes=2"])
    assert start(config, [sys.executable, "-c", code]) == 143
    assert Path("uploaded").exists() == has_time


RECORDS = """
import json, os, pathlib, sys, time
out = pathlib.Path({out!r})
status = json.loads((out / "status.json").read_text()) if out.exists() else {{}}
if os.environ["RANK"] == "0":
    with (out.parent / "seen").open("a") as file:
        print(json.dumps(status), file=file)
    out.mkdir(exist_ok=True)
    (out / "status.json").write_text(json.dumps({{"state": "failed", "error": "NaN"}}))
sys.exit({code})
"""


@pytest.mark.parametrize(("code", "starts"), [(1, 2), (2, 1)])
def test_a_run_that_is_started_again_is_not_failed_meanwhile(
    code: int, starts: int, tmp_path: Path
) -> None:
    """The ranks need seconds until they say that they run; whoever watches sees the parent."""
    program = RECORDS.format(out=str(tmp_path / "run"), code=code)
    ended, status = launch(tmp_path / "run", program, "launch.max_restarts=1")
    assert (ended, status["state"], status["error"]) == (code, "failed", "NaN")
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == starts and seen[0] == {}
    if starts == 2:
        assert (seen[1]["state"], seen[1]["restart"]) == ("running", 1)
        assert seen[1]["pid"] == os.getpid(), "the parent"


def test_a_mistake_that_only_a_restart_meets_ends_as_failed(tmp_path: Path) -> None:
    """Exit code 2 without a status: the one that announced the restart does not stay."""
    program = RECORDS.format(out=str(tmp_path / "run"), code="2 if status else 1").replace(
        'if os.environ["RANK"] == "0":', 'if os.environ["RANK"] == "0" and not status:'
    )
    code, status = launch(tmp_path / "run", program, "launch.max_restarts=3")
    assert (code, status["state"]) == (2, "failed")


SAVES = """
import os, pathlib, signal, sys
out = pathlib.Path({out!r})
with (out / "words").open("a") as file:
    print(*sys.argv[1:], file=file)
if {saves}:
    (out / "checkpoints/step_000000002.pt").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("saves", [True, False])
def test_a_restart_goes_on_with_what_this_start_has_saved(tmp_path: Path, saves: bool) -> None:
    """Else resume=never would throw it away, or with nothing saved take up the run before."""
    (tmp_path / "checkpoints").mkdir()
    old = tmp_path / "checkpoints/step_000000009.pt"
    old.touch()
    os.utime(old, (0, 0))
    code = SAVES.format(out=str(tmp_path), saves=saves)
    launch(tmp_path, code, "launch.max_restarts=1", "resume=never")
    words = sorted((tmp_path / "words").read_text().split("\n"))
    assert ("resume=auto" in words) is saves


@pytest.mark.parametrize("state", ["interrupted", "failed"])
def test_what_a_rank_has_told_stays(
    tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "status.json"
    path.write_text(json.dumps({"state": "running"}))
    tells = f'from pathlib import Path; Path({str(path)!r}).write_text(\'{{"state": "{state}"}}\')'
    code, status = launch(tmp_path, f"{tells}; raise SystemExit(3)")
    assert (code, status) == (3, {"state": state})
    assert capsys.readouterr().out == ""


def test_a_folder_in_use_is_refused_before_ranks_start(tmp_path: Path) -> None:
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "print('process 7 on node3', file=f, flush=True); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, tmp_path / ".lock"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="process 7 on node3 is training there"):
            launch(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w')")
        other.communicate()
    assert not (tmp_path / "started").exists()


def test_one_process_is_watched_where_it_may_start_again() -> None:
    assert not starts_ranks(load_config("simclr", []))
    assert starts_ranks(load_config("simclr", ["launch.max_restarts=1"]))


def test_ranks_start_as_this_command_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by ``-m``, which would take a typing.py of the current folder."""
    argv = ["simclr", "train.seed=1"]
    monkeypatch.setattr(sys, "argv", ["/venv/bin/selftask", "train", *argv])
    started = ["python", "-W", "ignore", "/venv/bin/selftask", "train", *argv]
    monkeypatch.setattr(sys, "orig_argv", started)
    assert own_command(argv) == [sys.executable, *started[1:]]
    monkeypatch.setattr(sys, "argv", ["/venv/bin/pytest"])  # called from python
    assert own_command(argv) == [sys.executable, "-m", "selftask", "train", *argv]


def test_a_mistake_of_the_user_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, status = launch(tmp_path / "run", "raise SystemExit(2)", "launch.max_restarts=3")
    assert (code, status) == (2, {})
    assert capsys.readouterr().out == ""
