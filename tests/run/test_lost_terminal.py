"""A run outlives its terminal: closed streams, a pipe without a reader, a hang-up, Ctrl-C."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from selftask.api.evaluation import evaluate
from selftask.api.trainer import Trainer
from selftask.cli.main import guarded, main
from selftask.distributed.world import STOP_SIGNALS
from selftask.errors import UserError
from selftask.hooks.stopping.preemption import StopOnSignal
from selftask.logs.lines import lasting_output, start_log, stop_log

LONG = "train.epochs=4000"


def test_a_pipe_without_a_reader_is_told_once_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        start_log(tmp_path, 0)
        try:
            with lasting_output():
                print("one", flush=True)
                print("two", flush=True)
        finally:
            stop_log()
        assert sys.stdout is pipe
        print("three", flush=True)  # at python's exit this is what would fail
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("is lost ([Errno 32] Broken pipe); the run continues")


def test_closed_streams_are_opened_again(tmp_path: Path) -> None:
    """Else sys.stdout is None, and what C code prints goes into the next file that is opened."""
    code = (
        "import os, sys; from selftask.cli.main import main; main(['--version'])\n"
        "number = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "print(sys.stdout.isatty(), file=sys.stderr)\n"
        "os.write(number, f'{number} {sys.stdin.read()!r}'.encode())"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "said")]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], env=tiny.environment(), check=False
    )
    assert done.returncode == 0
    number, read = (tmp_path / "said").read_text().split()
    assert int(number) > 2
    assert read == "''"


def test_what_the_locale_cannot_print_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with LANG=en_US.ISO-8859-1; a run printed nothing more, other commands failed."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert main(["config", "simclr/digits", "out=\u732b\u00e9"]) == 0
    sys.stdout.flush()
    assert b"\nout: \\u732b\xe9" in written.getvalue()


def test_a_script_without_standard_streams_trains_and_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    Trainer().train(tiny.task("simclr", tmp_path, "run", "train.max_steps=1"))
    assert "RUN finished" in (tmp_path / "run/log.txt").read_text()
    images = str(tiny.digits_file(tmp_path))
    assert evaluate(tmp_path / "run", "knn", data=images, data_val=images)["knn_top1"] > 0
    assert sys.stdout is None


def until_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while not (out / "metrics.jsonl").exists() or len(tiny.rows(out)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """Hung up, with nowhere to print to: it saves, and says in the folder how it left."""
    out = tmp_path / "run"
    command = tiny.command("simclr", tmp_path, "run", LONG)
    environment = tiny.environment()
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if nohup runs the tests
        os.execve(command[0], command, environment)
    until_step(out, 2)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    status = tiny.status(out)
    assert (status["state"], status["by"]) == ("interrupted", "SIGHUP")
    assert (out / f"checkpoints/step_{status['step']:09d}.pt").exists()
    assert "RUN interrupted by SIGHUP" in (out / "log.txt").read_text().splitlines()[-1]


def send(hook: StopOnSignal, number: int) -> None:
    assert signal.getsignal(number) == hook._receive
    os.kill(os.getpid(), number)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signals' handlers are put back after the test."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if nohup runs the tests
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_signals_are_acknowledged_and_a_second_one_leaves(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hook = StopOnSignal()
    send(hook, signal.SIGHUP)
    assert hook.received == "SIGHUP"
    assert "SIGHUP: stopping after this step; a second one leaves at once" in capfd.readouterr().err
    send(hook, signal.SIGHUP)  # of the shell, and of the kernel: no second wish
    assert capfd.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        send(hook, signal.SIGINT)
    assert "SIGINT again: leaving at once" in capfd.readouterr().err


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_a_launcher_forwards_is_no_second_one() -> None:
    hook = StopOnSignal()
    send(hook, signal.SIGTERM)
    send(hook, signal.SIGTERM)
    hook.since -= 2
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        send(hook, signal.SIGTERM)


def test_ctrl_c_inside_of_a_library_is_no_mistake_of_the_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """OmegaConf, interrupted, fails as it cleans up, and wraps that error in one of its own."""

    def command(argv: list[str]) -> int:
        try:
            try:
                raise KeyboardInterrupt
            finally:
                raise AttributeError("no attribute '_invalidate_flags_cache'")
        except AttributeError as error:
            raise UserError("eval.transforms: no attribute") from error

    assert guarded(command, []) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.usefixtures("handlers")
def test_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hook = StopOnSignal()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    hook.release()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
