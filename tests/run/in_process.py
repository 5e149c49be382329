"""``selftask train`` in the process of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from selftask.cli.main import main


def train(folder: Path, *more: str, out: str = "run") -> int:
    """``selftask train`` in this process."""
    return main(["train", "simclr/digits", *tiny.overrides("simclr", folder, out, *more)])


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]
