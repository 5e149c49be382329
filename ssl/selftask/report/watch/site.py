"""Runs and files that the server shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from selftask.errors import UserError
from selftask.report.overview.run_line import RunLine
from selftask.report.record import FILES, RunRecord

TEXTS = frozenset((*FILES, "groups.txt"))  # files of a run that are shown as text
_WEIGHTS = ("checkpoints", "export")  # folders whose files can be downloaded
FRESH_S = 1.0  # shortest time for which a result is reused, in seconds
REST = 10  # a result is reused for at least this many times the time it took to compute
T = TypeVar("T")


class NotThere(UserError):
    """Raised if there is no such page or file; the response is 404."""


class Cached(Generic[T]):
    """Result of an expensive function, shared by all threads, recomputed when it is too old."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._until = 0.0
        self._value: T | None = None

    def __call__(self) -> T:
        with self._lock:
            begun = time.monotonic()
            if self._value is None or begun >= self._until:
                self._value = self._make()
                ended = time.monotonic()
                self._until = ended + max(FRESH_S, REST * (ended - begun))
            return self._value


class Site:
    """Runs and files by the path of a request.

    Args:
        root: The folder of runs.
        read_lines: Function that returns the summaries of all runs, with the states of their jobs.
    """

    def __init__(self, root: Path, read_lines: Callable[[], Sequence[RunLine]]) -> None:
        self.root = root.resolve()
        self._read_lines = read_lines
        self.lines = Cached(self._lines)
        self._records: dict[Path, Cached[RunRecord]] = {}
        self._lock = threading.Lock()

    def _lines(self) -> dict[str, RunLine]:
        return {self._name(line.folder): line for line in self._read_lines()}

    def _name(self, folder: Path) -> str:
        resolved = folder.resolve()
        if resolved == self.root or not resolved.is_relative_to(self.root):
            return resolved.name
        return resolved.relative_to(self.root).as_posix()

    def split(self, parts: Sequence[str]) -> tuple[str, list[str]]:
        """Split a path into the name of a run, which may have several parts, and the rest.

        Raises:
            NotThere: If they name no run.
        """
        lines = self.lines()
        for count in range(len(parts), 0, -1):
            name = "/".join(parts[:count])
            if name in lines:
                return name, list(parts[count:])
        raise NotThere

    def folder(self, name: str) -> Path:
        """Return the folder of a run; raise NotThere if it is missing or outside of ``root``."""
        lines = self.lines()
        if name not in lines:
            raise NotThere
        folder = lines[name].folder.resolve()
        if not folder.is_relative_to(self.root) or not folder.is_dir():
            raise NotThere
        return folder

    def record(self, name: str) -> RunRecord:
        """Return the record of a run; raise UserError if it is no longer a run folder."""
        folder = self.folder(name)
        with self._lock:
            read = self._records.setdefault(folder, Cached(partial(RunRecord.read, folder)))
        return read()

    def open_file(self, name: str, parts: Sequence[str]) -> BinaryIO:
        """Open a text file, checkpoint or export of a run for reading bytes.

        Raises:
            NotThere: For other paths, or if the file cannot be read.
        """
        folder = self.folder(name)
        is_text = len(parts) == 1 and parts[0] in TEXTS
        if not is_text and not (len(parts) == 2 and parts[0] in _WEIGHTS):
            raise NotThere
        path = folder.joinpath(*parts).resolve()
        try:
            if path.is_relative_to(folder) and path.is_file():
                return path.open("rb")
        except OSError as error:
            raise NotThere(error.strerror) from error
        raise NotThere
