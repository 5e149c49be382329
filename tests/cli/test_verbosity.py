"""What train and eval print: a short table, all with --verbose, the last line with --quiet."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from selftask.cli.main import main
from selftask.logs import LOGGER, verbosity
from selftask.logs.lines import info_on_stderr, show_root_lines_of, start_log, stop_log

DETAILS = (
    "sampler: shuffled",
    "model: simclr on",
    "arithmetic:",
    "parameter groups of optimizer:",
    "threads: ",
)


def test_only_rank_0_logs_what_all_ranks_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``torchrun -m selftask eval``, each rank loads the weights."""
    for rank in (0, 1):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "1234")
        with info_on_stderr():
            LOGGER.info("weights of rank %d", rank)
            LOGGER.error("error of rank %d", rank)
    shown = capsys.readouterr().err
    assert "weights of rank 0" in shown and "weights of rank 1" not in shown
    assert "error of rank 0" in shown and "error of rank 1" in shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run that was stopped after two of four steps, and what it printed."""
    made = tmp_path_factory.mktemp("verbosity")
    words = tiny.command("simclr", made, "run", "train.epochs=null", "train.max_steps=4")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*words[words.index("train") :], "train.stop_at=2"]) == 75
    (made / "printed.txt").write_text(printed.getvalue())
    (made / "words.txt").write_text("\n".join(words))
    return made


def again(folder: Path, *more: str) -> list[str]:
    """The command of the run, with more words."""
    return [*(folder / "words.txt").read_text().splitlines(), *more]


def test_a_start_is_a_short_table(folder: Path) -> None:
    lines = (folder / "printed.txt").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("step "))
    topics = [line.split()[0] for line in lines[:first]]
    assert topics == [
        *("run", "data", "model", "batch", "epoch", "length", "optimizer", "lr", "device")
    ]
    assert f"new in {folder / 'run'}" in lines[0]


def test_the_log_has_every_detail_and_no_table(folder: Path) -> None:
    log = (folder / "run/log.txt").read_text()
    printed = (folder / "printed.txt").read_text()
    for detail in DETAILS:
        assert detail in log
        assert detail not in printed
    assert "length     " not in log


@pytest.mark.slow
def test_on_a_terminal(folder: Path) -> None:
    """Live lines are drawn there, and with NO_COLOR without colors; the table says `resumes`."""
    text = on_a_terminal(again(folder, "train.stop_at=3"), folder, TERM="xterm", NO_COLOR="1")
    assert "resumes at step 2 of 4" in text
    assert "\x1b[2K" in text, "lines are erased"
    assert "\x1b[3" not in text, "no colors"
    assert "pretrain" in text and "/4" in text


@pytest.mark.parametrize(("term", "no_color"), [("xterm", ""), ("dumb", ""), ("xterm", "1")])
def test_warnings_have_a_color_on_a_terminal(tmp_path: Path, term: str, no_color: str) -> None:
    code = (
        "import logging, sys, pathlib\n"
        "from selftask.logs.lines import LOGGER, start_log\n"
        "start_log(pathlib.Path('.'), rank=0)\n"
        "LOGGER.info('an info'); LOGGER.warning('a warning'); LOGGER.error('an error')\n"
    )
    words = [sys.executable, "-c", code]
    shown = on_a_terminal(words, tmp_path, TERM=term, NO_COLOR=no_color).splitlines()
    plain = ["an info", "a warning", "an error"]
    has_color = term == "xterm" and not no_color
    colored = ["an info", "\x1b[33ma warning\x1b[0m", "\x1b[31man error\x1b[0m"]
    assert shown == (colored if has_color else plain)
    assert [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()] == plain
    assert tiny.run(words, tmp_path, TERM=term).stdout.splitlines() == plain  # a pipe


@pytest.mark.slow
def test_on_a_dumb_terminal_and_loudly(folder: Path) -> None:
    text = on_a_terminal(again(folder, "out=dumb", "--verbose"), folder, TERM="dumb")
    assert "\x1b" not in text and "pretrain" not in text
    for detail in (*DETAILS, "versions: selftask ", "config: train.max_steps: 4 ", "start-up: "):
        assert detail in text
    assert "# command line: train.max_steps=4" in text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_quiet_is_the_last_line(folder: Path, ranks: int) -> None:
    words = again(folder, f"out=quiet{ranks}", f"launch.processes={ranks}", "-q")
    done = tiny.run(words, folder)
    assert done.stdout.startswith("RUN finished: 4 steps in ")
    assert done.stdout.count("\n") == 1
    assert "sampler: shuffled" in (folder / f"quiet{ranks}/log.txt").read_text()


def test_the_choice_ends_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(verbosity.VARIABLE, raising=False)
    assert main(["train", "simclr", "train.epoch=3", "--quiet"]) == 2
    assert verbosity.VARIABLE not in os.environ
    assert "did you mean 'train.epochs'" in capsys.readouterr().err
    assert main(["train", "simclr", "-q", "-v"]) == 2
    assert "--quiet and --verbose: give one" in capsys.readouterr().err


def on_a_terminal(words: list[str], cwd: Path, **env: str) -> str:
    """What a command prints to a pseudo-terminal of 110 columns."""
    ours, theirs = pty.openpty()
    env = tiny.environment(COLUMNS="110", LINES="30", **env)
    process = subprocess.Popen(words, cwd=cwd, env=env, stdout=theirs, stderr=subprocess.STDOUT)
    os.close(theirs)
    read = bytearray()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        read += part
    os.close(ours)
    assert process.wait() in (0, 75), read.decode()
    return read.decode()


@pytest.mark.parametrize("propagates", [True, False])
def test_a_log_leaves_the_loggers_as_it_found_them(
    propagates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pytest's caplog and an application's own handlers listen to the root logger or to ours."""
    root = logging.getLogger()
    monkeypatch.setattr(LOGGER, "propagate", propagates)
    monkeypatch.setattr(LOGGER, "handlers", [*LOGGER.handlers, logging.StreamHandler()])
    before = LOGGER.level, root.level, list(LOGGER.handlers), list(root.handlers)
    start_log(tmp_path, 0)
    start_log(tmp_path, 1)  # closes the first
    show_root_lines_of("a_package")
    assert not LOGGER.propagate
    assert LOGGER.level != before[0]
    stop_log()
    assert LOGGER.propagate is propagates
    assert (LOGGER.level, root.level, list(LOGGER.handlers), list(root.handlers)) == before
