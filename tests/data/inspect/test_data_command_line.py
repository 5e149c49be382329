"""The command line of ``selftask data``: arguments, help, progress, interrupts."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from selftask.cli.data import COMMANDS
from selftask.cli.inspect_data.inspect_commands import CountDone
from selftask.cli.main import main
from selftask.cli.options import take_options
from selftask.errors import RunError, UserError


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["chekc", "x"], "did you mean 'check'?"),
        (["check"], "needs a SOURCE"),
        (["check", "data.labels=false"], "needs a SOURCE"),
        (["check", "no/such/folder"], "no such folder"),
        (["check", "digits", "--worker", "2"], "did you mean '--workers'?"),
        (
            ["check", "digits", "--workers", "two"],
            "--workers two: expected 0 or a positive whole number",
        ),
        (["check", "digits", "--workers", "0"], "--workers 0"),
        (["check", "digits", "--workers"], "--workers needs a value"),
        (["check", "digits", "--json=yes"], "--json takes no value"),
        (["check", "digits", "--out", "no/such/x.txt"], "there is no folder"),
        (["check", "digits", "data.max_pixel=3"], "did you mean 'data.max_pixels'?"),
        (["stats"], "needs a SOURCE"),
        (["stats", "digits", "--max", "0"], "--max 0"),
        (["stats", "digits", "--max", "-3"], "expected 0 or a positive whole number"),
    ],
)
def test_bad_arguments_of_data_check_and_stats_are_refused(
    argv: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *argv]) == 2
    error = capfd.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_options_among_words() -> None:
    known = {"--workers": int, "--out": str, "--json": bool}
    words, options = take_options(["a", "--workers=3", "b=c", "--out", "x y", "--json"], known)
    assert words == ["a", "b=c"]
    assert options == {"--workers": 3, "--out": "x y", "--json": True}
    with pytest.raises(UserError, match="--out needs a value"):
        take_options(["--out"], known)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["data", name, "--help"]) == 0
    assert capfd.readouterr().out.startswith(f"usage: selftask data {name} ")
    assert main(["data"]) == 0
    assert f"selftask data {name} " in capfd.readouterr().out


class Terminal(io.StringIO):
    """Takes itself for a terminal, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_on_a_terminal_and_in_a_log(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, now = Terminal(is_terminal), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("selftask.cli.inspect_data.inspect_commands.time.monotonic", lambda: now[0])
    with CountDone("read", 1000) as count:
        for done in range(1, 1001):
            now[0] += 0.0625
            count(done)
    said = stream.getvalue()
    if is_terminal:
        assert said.count("\r") == 1000 // 4 + 1, "each 0.2 s, that is each fourth image"
        assert "\n" not in said
        assert said.endswith("\r\033[K"), "nothing of it stays"
        assert "\rread 500 of 1,000, 16 images/s, 31 s left\033[K" in said
    else:
        first = "read 480 of 1,000, 16 images/s, 32 s left"
        assert said.splitlines() == [first, "read 960 of 1,000, 16 images/s, 2 s left"]


def test_an_interrupt_ends_a_survey_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("selftask.data.inspect.check.check", _failing(KeyboardInterrupt()))
    assert main(["data", "check", "digits"]) == 130
    assert capfd.readouterr().err.splitlines()[-1] == "interrupted"
    monkeypatch.setattr("selftask.data.inspect.check.check", _failing(RunError("they all end")))
    assert main(["data", "check", "digits"]) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "error: they all end"


def _failing(error: BaseException) -> Callable[..., None]:
    def check(*words: object, **more: object) -> None:
        raise error

    return check
