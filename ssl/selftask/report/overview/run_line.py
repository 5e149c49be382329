"""Summary of a run in one line: state, progress and newest values, from the ends of its files.

Does not import torch, and reads only parts of large files, so that a thousand runs take seconds.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selftask.files.received import UnreadableFile, drop_misfits, open_regular, read_json
from selftask.logs.rows import is_measured
from selftask.logs.tails import TAIL, last_line, last_lines
from selftask.logs.unreadable import unreadable_sentences
from selftask.report.overview.liveness import age, judge
from selftask.report.record_forms import STATUS, numeric_rows, total_steps

_CONFIG_BYTES = 1 << 15
_LONG_TAIL = 1 << 20  # bytes of metrics.jsonl in which the last evaluation is looked for
_RECIPE = re.compile(r"^recipe: (.+)$", re.MULTILINE)
_METHOD = re.compile(r"^method:\n(?:  .*\n)*?  name: (\S+)", re.MULTILINE)
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
ENDED_EARLY = ("failed", "interrupted", "requeued")


@dataclass(frozen=True)
class RunLine:
    """State and newest values of a run."""

    folder: Path
    state: str
    recipe: str = ""
    method: str = ""
    step: int | None = None
    total_steps: int | None = None
    values: dict[str, float] = field(default_factory=dict)  # newest value of each column
    evaluations: tuple[str, ...] = ()  # columns of `values` that are results of evaluations
    age_s: float | None = None  # seconds since the last row
    eta_s: float | None = None  # remaining seconds of a running run
    note: str = ""  # why it is neither running nor finished, or unreadable images, in one line
    last_line: str = ""  # last line of log.txt
    job: str = ""  # id of its job

    @property
    def share(self) -> float | None:
        """Finished steps divided by all steps, or None if unknown."""
        return self.step / self.total_steps if self.step is not None and self.total_steps else None


def read_line(folder: Path) -> RunLine:
    """Return the summary of a run folder, which may be incomplete or missing.

    If a file cannot be read, ``note`` names it.
    """
    try:
        return _read(folder, time.time())
    except OSError as error:
        return unreadable(folder, error)


def unreadable(folder: Path, error: OSError) -> RunLine:
    """Return the summary of a run folder with a file that cannot be read."""
    path, reason = Path(error.filename or folder), error.strerror or str(error)
    reason = reason if isinstance(error, UnreadableFile) else reason.lower()
    inside = path.is_relative_to(folder) and path != folder
    name = path.relative_to(folder) if inside else path
    return RunLine(folder, "unreadable", note=f"cannot be read: {name}: {reason}")


def _read(folder: Path, now: float) -> RunLine:
    status, problem = _status(folder / "status.json")
    rows = _newest_rows(folder / "metrics.jsonl")
    age_s = age(folder / "metrics.jsonl", now)
    log = last_line(folder / "log.txt")
    recipe, method = _names(folder / "config.yaml")
    steps = (rows.values.get("step"), status.get("step"))
    step = max((int(step) for step in steps if step is not None), default=None)
    if rows.problem and not problem:
        problem = f"cannot be read: metrics.jsonl: {rows.problem}"
    line = RunLine(
        folder,
        status.get("state") or "not started",
        recipe,
        method,
        step,
        _total_steps(status, rows.values, step),
        rows.values,
        rows.evaluations,
        age_s,
        last_line=log,
    )
    if problem:
        return replace(line, state="unreadable", note=problem)
    if not status and (step is not None or log):
        return replace(line, state="unknown", note="status.json is missing")
    unreadable = unreadable_sentences(status)
    if line.state == "running":
        state, note = judge(folder, status, rows.interval_s, now, eval_s=rows.values.get("eval_s"))
        eta = rows.values.get("eta_s") if state == "running" else None
        eta = None if eta is None else max(0.0, eta - (age_s or 0.0))
        return replace(line, state=state, note=_joined(note, unreadable), eta_s=eta)
    if line.state in ENDED_EARLY:
        error = str(status.get("error", "")).partition("\n")[0]
        others = [text for text in unreadable if text not in log]
        return replace(line, note=_joined(_TIME.sub("", log) or error, others))
    return replace(line, note=_joined("", unreadable))


def _joined(note: str, unreadable: list[str]) -> str:
    return "; ".join(filter(None, [note, *unreadable]))


def _status(path: Path) -> tuple[dict[str, Any], str]:
    """Return the content of ``status.json``, and an error message or an empty string."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}, ""
    problems = drop_misfits(content, STATUS)
    if not problems and content.get("state") is None:
        problems = ["has no state"]
    return content, f"cannot be read: {path.name}: {problems[0]}" if problems else ""


@dataclass
class _Rows:
    values: dict[str, float]
    evaluations: tuple[str, ...]
    interval_s: float | None  # seconds between the last two training rows
    problem: str = ""


def _newest_rows(path: Path) -> _Rows:
    """Return the newest value of each column in the last 64 KiB of a ``metrics.jsonl``.

    If there is no row of an evaluation, the last MiB is read.
    """
    rows = _rows_of(last_lines(path, TAIL))
    return rows if rows.evaluations else _rows_of(last_lines(path, _LONG_TAIL))


def _rows_of(lines: list[str]) -> _Rows:
    values: dict[str, float] = {}
    evaluations: list[str] = []
    trained: list[dict[str, float]] = []
    problem = ""
    for text in reversed(lines):
        of_training = '"loss": ' in text
        if of_training and len(trained) == 2:
            continue  # parsing all rows of a thousand runs would be slow
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):  # still being written, or the disk is full
            continue
        if not isinstance(row, dict):
            continue
        numbers, wrong = numeric_rows([row])
        problem = problem or wrong
        if not numbers:
            continue
        (row,) = numbers
        if of_training:
            trained.append(row)
        names = [name for name in row if name not in values]
        values |= {name: row[name] for name in names}
        if not of_training:
            evaluations += [n for n in names if n not in ("step", "epoch") and not is_measured(n)]
    interval = None
    if len(trained) == 2 and "step_s" in trained[0]:
        interval = (trained[0]["step"] - trained[1]["step"]) * trained[0]["step_s"]
    return _Rows(values, tuple(evaluations), interval, problem)


def _total_steps(status: dict[str, Any], values: dict[str, float], step: int | None) -> int | None:
    """Return the length of a run in steps, or None before a row shows the length of an epoch."""
    if status.get("state") == "finished":
        return step
    epochs, most = status.get("length") or (None, None)
    return total_steps(most, epochs, values)


def _names(path: Path) -> tuple[str, str]:
    """Return recipe and method of a ``config.yaml`` without parsing the whole file."""
    try:
        with open_regular(path) as file:
            text = file.read(_CONFIG_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return "", ""
    recipe, method = _RECIPE.search(text), _METHOD.search(text)
    return recipe[1].strip("'\"") if recipe else "", method[1] if method else ""
