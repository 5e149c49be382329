"""What is submitted in tests without a cluster: the words of a small run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from selftask.cli.main import main

CLUSTER = ("launch.nodes=2", "launch.processes=4", "launch.slurm.time=2:30:00")
Fake = Callable[[str, str], None]  # of conftest
SMALL: list[str] = []  # of the fixture small_words: they are dear, and asked for once


def words(folder: Path, out: str, *more: str) -> list[str]:
    """The small run in ``folder/out``."""
    return [*SMALL, f"out={folder / out}", *more]


def submit(folder: Path, *more: str) -> int:
    return main(["submit", "simclr/digits", *words(folder, "run", *more)])
