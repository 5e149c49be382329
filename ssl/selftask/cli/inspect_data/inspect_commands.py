"""Helpers of commands that read a whole data set: open it and show progress."""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from selftask.config.schema import DataConfig
from selftask.config.trust import take_trust
from selftask.data.source import Source
from selftask.errors import UserError

BLANK = "base/evaluate.yaml"  # recipe of which only the data section is used


class Survey(NamedTuple):
    """An opened source, its name on the command line, its config, and the number of processes."""

    name: str
    source: Source
    config: DataConfig
    num_workers: int


def open_for_survey(command: str, words: list[str], num_workers: int | None, usage: str) -> Survey:
    """Open the SOURCE of a command line.

    Args:
        command: Name of the subcommand, for messages.
        words: SOURCE, followed by ``key=value`` words.
        num_workers: Number of reading processes, or None for one per core.
        usage: Usage text, for messages.

    Raises:
        UserError: If SOURCE is missing, ``num_workers`` is 0, a word is invalid, the source cannot
            be opened, or a catalog names code without ``trust=true``.
    """
    words, trust = take_trust(words)
    if not words or not is_source(words[0]):
        raise UserError(f"data {command} needs a SOURCE before any key=value\n{usage}")
    if num_workers == 0:
        raise UserError("--workers 0: must be at least 1")

    from selftask.config.compose import recipes
    from selftask.config.load import load_config
    from selftask.config.values.auto_values import cores
    from selftask.data.loading.open_data import open_data

    recipe = str(recipes.folder() / BLANK)
    data = load_config(recipe, [f"data={words[0]}", *words[1:]], trust=trust).data
    return Survey(words[0], open_data(data).train, data, num_workers or cores())


def is_source(word: str) -> bool:
    """Return whether a word is a source, not ``key=value``.

    A path may contain ``=`` after a slash, or if it begins with a slash or dot; ``{...}`` is a
    source, too.
    """
    return "=" not in word.split("/")[0] or word.startswith(("/", ".", "{"))


class CountDone:
    """Context manager that shows progress on stderr.

    Call it with the number of images that are done. On a terminal the line is updated in place,
    otherwise a line is printed every 30 s.

    Args:
        doing: Word before the counts, such as ``read``.
        total: Number of images.
    """

    def __init__(self, doing: str, total: int) -> None:
        self.doing, self.total = doing, total
        self.in_place = sys.stderr.isatty()
        self.every_s = 0.2 if self.in_place else 30.0

    def __enter__(self) -> CountDone:
        self.started = self.shown = time.monotonic()
        return self

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.shown < self.every_s:
            return
        self.shown = now
        rate = done / (now - self.started)
        seconds = (self.total - done) / rate
        text = (
            f"{self.doing} {done:,} of {self.total:,}, {rate:,.0f} images/s, {seconds:,.0f} s left"
        )
        print(
            f"\r{text}\033[K" if self.in_place else f"{text}\n", end="", file=sys.stderr, flush=True
        )

    def __exit__(self, *_: object) -> None:
        if self.in_place:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
