"""Read a run folder without torch, even if the run is active or the folder is damaged."""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from selftask.checkpoint.kept import Kept
from selftask.checkpoint.rotation import checkpoints, step_of
from selftask.errors import UserError
from selftask.files.paths import is_folder
from selftask.files.received import Kind, drop_misfits, is_number, read_json
from selftask.files.yaml_file import read_yaml
from selftask.logs.checkpoint_results import result_files
from selftask.logs.drawn_rows import Lines, read_drawn_rows, read_ends
from selftask.report.overview.liveness import judge
from selftask.report.record_forms import CONFIG, ENVIRONMENT, STATUS, numeric_rows, valid_events

FILES = (
    *("config.yaml", "log.txt", "metrics.jsonl", "events.jsonl", "status.json"),
    *("environment.json", "git.diff"),
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file or folder, and the reason for keeping it."""

    step: int
    path: Path
    size: int  # in bytes
    why: str  # why it is kept: `newest`, `best` and its rank, `for good`, or `recent`


@dataclass(frozen=True)
class Column:
    """The values of one column of ``metrics.jsonl``, in the order of their steps."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Clock:
    """Epochs and seconds of training by step, without evaluations and the time between attempts."""

    steps: Sequence[int]
    epochs: Sequence[float]
    seconds: Sequence[float]


@dataclass
class RunRecord:
    """Contents of the files of a run folder as plain values, empty for missing files.

    ``state`` is read from ``status.json``. If it is ``running`` but the run is not active, it is
    replaced by ``hung`` or ``lost``, and the field ``lost`` has the reason. ``problems`` has a line
    for each file or value that cannot be read. Values of unexpected types are dropped. If
    ``status.json`` has such a value, ``state`` is ``unreadable``.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)  # rows of `selftask eval suite`
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Results of ``selftask eval``, by the step of the checkpoint and then by date."""
    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    exports: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    thinned: list[str] = field(default_factory=list)  # large files that were read in part
    state: str = "unknown"
    lost: str = ""
    read_at: float = field(default_factory=time.time)

    @classmethod
    def read(cls, folder: str | Path) -> RunRecord:
        """Read a run folder.

        Raises:
            UserError: If there is no such folder, or it is not the folder of a run.
        """
        folder = Path(folder).expanduser()
        if not is_folder(folder):
            raise UserError(f"{folder}: there is no such run")
        if not is_run(folder):
            raise UserError(f"{folder}: not a run folder (it has neither config.yaml nor a log)")
        record = cls(folder=folder)
        record.config = record._read_values("config.yaml", read_yaml, CONFIG)
        record.environment = record._read_values("environment.json", read_json, ENVIRONMENT)
        sound = len(record.problems)
        record.status = record._read_values("status.json", read_json, STATUS)
        is_sound = len(record.problems) == sound or not record.status
        record.rows = record._read_lines("metrics.jsonl", read_drawn_rows, numeric_rows)
        for path in result_files(folder):
            name = str(path.relative_to(folder))
            record.results += record._read_lines(name, read_ends)
        record.evaluations = record._read_lines("evaluations.jsonl", read_ends)
        record.evaluations.sort(key=lambda r: r["step"] if is_number(r.get("step")) else math.inf)
        record.events = record._read_lines("events.jsonl", read_ends, valid_events)
        record.checkpoints = list_checkpoints(folder / "checkpoints")
        record.exports = sorted(path for path in (folder / "export").glob("*") if path.is_file())
        state = str(record.status.get("state") or "unknown")
        record.state = state if is_sound else "unreadable"
        if record.state == "running":
            times = record._interval_s(), record.read_at
            eval_s = record.last("eval_s")
            record.state, record.lost = judge(folder, record.status, *times, eval_s=eval_s)
        return record

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.resolve().name

    @property
    def recipe(self) -> str:
        """Recipe as given on the command line, else the method's name, or ``unknown recipe``."""
        return str(self.config.get("recipe") or self.method or "unknown recipe")

    @property
    def method(self) -> str:
        """Registered name of the method, or an empty string."""
        return str(self.setting("method.name") or "")

    @property
    def command(self) -> str:
        """Command line that started the run, as typed in a shell, or an empty string."""
        words = [str(word) for word in self.environment.get("command") or []]
        name = Path(words[0]).name if words else ""
        return shlex.join([name.replace("__main__.py", "selftask"), *words[1:]]) if words else ""

    @property
    def step(self) -> int:
        """Number of finished steps, according to rows, status and events."""
        steps = [self.rows[-1]["step"] if self.rows else 0, self.status.get("step") or 0]
        return max(steps + [event.get("step") or 0 for event in self.events[-1:]])

    @property
    def epoch(self) -> float | None:
        """Number of finished epochs at the last row, or None."""
        return next((row["epoch"] for row in reversed(self.rows) if "epoch" in row), None)

    @property
    def started(self) -> datetime | None:
        """Time of the first event, the start of the first attempt, or None."""
        return time_of(self.events[0]) if self.events else None

    @property
    def ended(self) -> datetime | None:
        """Time of reading if the run is active, else of its last status or event, or None."""
        if self.state == "running":
            return datetime.fromtimestamp(self.read_at).astimezone()
        times = [time_of(event) for event in self.events[-1:]]
        if self.status.get("updated"):  # of a killed run, its start
            times.append(datetime.fromtimestamp(float(self.status["updated"])).astimezone())
        return max(filter(None, times), default=None)

    @property
    def num_attempts(self) -> int:
        """Number of times that the run was started."""
        return sum(event.get("event") == "start" for event in self.events)

    def setting(self, key: str) -> Any:
        """Return a value of ``config.yaml`` by its dotted key, or None.

        The value of a section in short form, such as ``method: simclr``, is used as its ``name``.
        """
        value: Any = self.config
        for name in key.split("."):
            if isinstance(value, str) and name == "name":
                return value
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The numeric columns of the rows, in order of appearance."""
        return columns_of(self.rows)

    @cached_property
    def clock(self) -> Clock:
        """Steps, epochs and seconds of training at each row of training, after an entry of zeros.

        The time of evaluations, which ``step_s`` of a row includes, is subtracted.
        """
        steps, epochs, seconds = [0], [0.0], [0.0]
        evaluated_s = 0.0  # since the last row; the evaluation at step 0 is before the first step
        for row in self.rows:
            evaluated_s += row.get("eval_s", 0.0) if row["step"] else 0.0
            if "step_s" not in row or row["step"] <= steps[-1]:
                continue
            passed_s = row["step_s"] * (row["step"] - steps[-1])
            seconds.append(seconds[-1] + max(0.0, passed_s - evaluated_s))
            epochs.append(row.get("epoch", 0.0))
            steps.append(row["step"])
            evaluated_s = 0.0
        return Clock(steps, epochs, seconds)

    @property
    def evaluation_s(self) -> float:
        """Seconds of all evaluations during training."""
        return sum(self.columns["eval_s"].values) if "eval_s" in self.columns else 0.0

    def last(self, name: str) -> float | None:
        """Return the last value of a column, or None."""
        column = self.columns.get(name)
        return column.values[-1] if column else None

    def _interval_s(self) -> float | None:
        """Return the usual time between two rows of training, or None before there are two."""
        column = self.columns.get("step_s")
        if column is None or len(column.steps) < 2:
            return None
        steps = column.steps[-1] - column.steps[-2]
        return steps * statistics.median(column.values)

    def _read_values(
        self, name: str, read: Callable[[Path], dict[str, Any]], kinds: Mapping[str, Kind]
    ) -> dict[str, Any]:
        """Return the values of a file, without those of unexpected types; note ``problems``."""
        try:
            content = read(self.folder / name)
        except FileNotFoundError:
            self.problems.append(f"{name} is missing")
            return {}
        except OSError as error:
            self._cannot_read(name, error.strerror)
            return {}
        for problem in drop_misfits(content, kinds):
            self._cannot_read(name, problem)
        return content

    def _read_lines(
        self,
        name: str,
        read: Callable[[Path], Lines],
        check: Callable[[list[dict[str, Any]]], tuple[list[dict[str, Any]], str]] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the objects of a file with one JSON object per line; none if it is missing.

        Unexpected values are dropped. What is damaged or unreadable is added to ``problems``, and a
        file that is read in part to ``thinned``.
        """
        try:
            lines = read(self.folder / name)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._cannot_read(name, error.strerror)
            return []
        if lines.damaged:
            self.problems.append(f"{name}: {lines.damaged} damaged lines were left out")
        if lines.lines:
            self.thinned.append(f"{name}: {len(lines.rows):,} of {lines.lines:,} rows are read")
        rows, problem = (lines.rows, "") if check is None else check(lines.rows)
        if problem:
            self._cannot_read(name, problem)
        return rows

    def _cannot_read(self, name: str, reason: str | None) -> None:
        self.problems.append(f"{name} cannot be read: {reason}")


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """Return the numeric columns of rows, in order of appearance.

    The values of a column are in the order of steps. If several rows have the same step, the last
    one is used.
    """
    columns: dict[str, Column] = {}
    ordered = True
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            if name == "step" or type(value) not in (int, float):
                continue
            column = columns.get(name)
            if column is None:
                columns[name] = Column([step], [value])
                continue
            ordered = ordered and step > column.steps[-1]
            column.steps.append(step)
            column.values.append(value)
    return columns if ordered else {name: _in_order(column) for name, column in columns.items()}


def _in_order(column: Column) -> Column:
    values = dict(zip(column.steps, column.values, strict=True))
    return Column(sorted(values), [values[step] for step in sorted(values)])


def is_run(folder: Path) -> bool:
    """Return True if a folder has a ``config.yaml``, a ``status.json`` or a ``log.txt``."""
    return any((folder / name).is_file() for name in ("config.yaml", "status.json", "log.txt"))


def time_of(event: Mapping[str, Any]) -> datetime | None:
    """Return the time of an event in this machine's time zone, or None if it has no valid time."""
    try:
        return datetime.fromisoformat(event["time"]).astimezone()
    except (KeyError, ValueError, OverflowError):
        return None


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, newest first, except one that is being removed."""
    kept, listed = Kept.read(folder), []
    for number, path in enumerate(checkpoints(folder)):
        step = step_of(path)
        why = [f"best {rank}" for rank, (best, _) in enumerate(kept.best, 1) if best == step]
        why += ["for good"] * (step in kept.every) + ["newest"] * (number == 0)
        try:
            size = sum(file.stat().st_size for file in _files(path))
        except OSError:  # the run has removed it in the meantime
            continue
        listed.append(Checkpoint(step, path, size, ", ".join(why) or "recent"))
    return listed


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
