"""Rows of the table of ``acceptance.py``, and what its checks run on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

ON_DEVICE = "train.device=auto"


@dataclass(frozen=True)
class Result:
    """A row of the table; ``passed`` is None if nothing is expected."""

    check: str
    case: str
    figure: str
    expected: str = ""
    passed: bool | None = None
    of_method: bool = False

    @classmethod
    def stopped(cls, check: str, case: str, error: Exception, of_method: bool = False) -> Result:
        """Return the row of an exception."""
        return cls(check, case, first_line(error), "no exception", False, of_method)

    def __str__(self) -> str:
        """Return the row in Markdown."""
        word = {None: "-", True: "pass", False: "FAIL"}[self.passed]
        return f"| {word} | {self.check} | {self.case} | {self.figure} | {self.expected} |"


def first_line(error: Exception) -> str:
    """Return type and message of an error, at most 160 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


@dataclass
class Table:
    """Rows as they come: printed, and written to ``out``, so that a time limit leaves them."""

    out: Path | None = None
    show: Callable[[Result], str] = str
    results: list[Result] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def add(self, result: Result) -> None:
        """Add a row; several threads may."""
        with self._lock:
            self.results.append(result)
            print(self.show(result), flush=True)
            if self.out:
                self.out.write_text(self.page(), encoding="utf-8")

    @property
    def failed(self) -> int:
        """Number of rows that failed."""
        return sum(result.passed is False for result in self.results)

    def page(self) -> str:
        """Return the page for ``docs/``: a table of checks, and one of methods."""
        kept = [result for result in self.results if not result.of_method]
        count = (
            f"`python tools/gpu/acceptance.py`: {self.failed} of {len(self.results)} rows failed."
        )
        head = ["# On a GPU", "", count, ""]
        table = ["| | check | case | figure | expected |", "|---|---|---|---|---|", *map(str, kept)]
        return "\n".join([*head, *table, *self._of_methods(), ""])

    def _of_methods(self) -> list[str]:
        """Return the lines of a table with a row for each method and a column for each check."""
        kept = [result for result in self.results if result.of_method]
        columns = list(dict.fromkeys(result.check for result in kept))
        cells = {(result.case, result.check): result for result in kept}
        lines = ["", f"| method | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for method in sorted({result.case for result in kept}):
            found = [cells.get((method, column)) for column in columns]
            words = [_cell(result) if result else "" for result in found]
            lines.append(f"| {method} | {' | '.join(words)} |")
        return lines if kept else []


def _cell(result: Result) -> str:
    return f"**FAIL** {result.figure}" if result.passed is False else result.figure


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks of speed: of the real recipes, or tiny for a test."""

    recipes: tuple[str, ...] = (
        "supervised/resnet50_imagenet",
        "simclr/resnet50_imagenet",
        "dino/vit_small_imagenet",
        "mae/vit_base_imagenet",
    )
    batch_size: int = 128
    images: int = 12_800  # no epoch ends in a run
    height: int = 256
    steps: int = 40
    more: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ("classes=1000",)  # words of a plan
    compiler: str = "inductor"
    modes: tuple[str, ...] = ("null", "reduce-overhead")  # the second: CUDA graphs


@dataclass(frozen=True)
class Setting:
    """Where and what to check."""

    device: str
    methods: list[str]
    folder: Path
    without_waits: Callable[[], AbstractContextManager[Any]]
    printed_losses: Callable[[list[str], str], dict[str, Any]]
    """Returns the losses of methods in a process with ``CUDA_LAUNCH_BLOCKING``."""
    run_command: Callable[..., subprocess.CompletedProcess[str]]
    """Trains a method in processes of their own."""
    ranks: int = 1
    sizes: Sizes = Sizes()

    @property
    def on_device(self) -> str:
        """Return the override that selects the device."""
        return "train.device=cpu" if self.device == "cpu" else ON_DEVICE
