"""``selftask runs``: print a table of all runs below a folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from selftask.cli.options import take_keys, take_options
from selftask.errors import UserError, plural, printable_line
from selftask.files import paths
from selftask.files.addresses import is_remote
from selftask.report.overview.find import find_runs
from selftask.report.overview.run_line import RunLine, read_line
from selftask.report.overview.table import (
    as_json,
    columns_of,
    count_states,
    sort_by,
    text_table,
    with_states,
)
from selftask.slurm import queue

USAGE = """\
usage: selftask runs [DIR ...] [sort=COLUMN] [state=STATE,...] [columns=NAME,...]

All runs in and below DIR (runs/ if none is given), local ones and those of SLURM: state, step,
newest values, images a second, age of the last row, remaining time; of a run that failed the last
line of its log. Several folders make one table.

  sort=knn_top1     best first; -knn_top1: worst first; any column, also run, state, step, age
  state=failed,hung only these: running finished interrupted requeued failed hung lost pending ...
  columns=loss,lr   columns of metrics.jsonl instead of the loss and the evaluations
  --json            a list of objects, with all columns of each run
  --watch           the table again every 2 seconds, until Ctrl-C

hung: no sign of life from the process, or no row for much longer than usual.
lost: the process or its job ended without reporting why."""

REFRESH_S = 2.0
_KEYS = ("sort", "state", "columns")
_CLEAR = "\x1b[H\x1b[J"


@dataclass(frozen=True)
class _Wanted:
    folders: list[Path]
    sort: str
    states: list[str]
    columns: list[str]


def main(argv: list[str]) -> int:
    """Print the table, once or until Ctrl-C."""
    words, options = take_options(argv, {"--json": bool, "--watch": bool})
    wanted = _read(words)
    if options.get("--json"):
        print(json.dumps([as_json(line) for line in _lines(wanted)], indent=1))
        return 0
    if options.get("--watch"):
        return _watch(wanted)
    print("\n".join(_text(wanted)))
    return 0


def _read(words: list[str]) -> _Wanted:
    names, given = take_keys(words, dict.fromkeys(_KEYS, ""))
    chosen = {key: [part for part in given[key].split(",") if part] for key in _KEYS}
    folders = [folder_of(name) for name in names or ["runs"]]
    return _Wanted(folders, given["sort"], chosen["state"], chosen["columns"])


def folder_of(word: str, command: str = "runs") -> Path:
    """Return the local folder that a word names; raise UserError if there is none."""
    if is_remote(word):
        raise UserError(f"{word}: an address; copy its runs to a folder, or name a local one")
    if not paths.is_folder(word):
        hint = "there are no runs here yet" if word == "runs" else "no such folder"
        raise UserError(f"{word}: {hint}; selftask {command} DIR looks in DIR")
    return Path(word)


def lines_of(folders: list[Path]) -> list[RunLine]:
    """Return a line for each run below the folders, with the state of its job."""
    runs: dict[Path, RunLine] = {}
    jobs: dict[Path, str] = {}
    for folder in folders:
        below = find_runs(folder)
        recorded, unread = queue.jobs_of((folder, *below.submissions))
        jobs |= {run.resolve(): job for run, job in recorded.items()}
        runs |= {line.folder.resolve() / queue.JOBS: line for line in unread}
        runs |= {run.resolve(): read_line(run) for run in below.runs}
    runs |= {run: read_line(run) for run in jobs if run not in runs}
    states = queue.queue(list(jobs.values())) if jobs else {}
    return [
        queue.with_job(line, jobs[run], states.get(jobs[run], "")) if run in jobs else line
        for run, line in runs.items()
    ]


def _lines(wanted: _Wanted) -> list[RunLine]:
    lines = with_states(lines_of(wanted.folders), wanted.states)
    return sort_by(lines, wanted.sort) if wanted.sort else lines


def _text(wanted: _Wanted) -> list[str]:
    lines = _lines(wanted)
    if not lines:
        where = ", ".join(map(str, wanted.folders))
        return [f"no runs in {where}" + (" in this state" if wanted.states else "")]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    table = text_table(lines, columns_of(lines, wanted.columns), width)
    return [
        *table,
        printable_line(f"{len(lines)} {plural('run', len(lines))}: {count_states(lines)}"),
    ]


def _watch(wanted: _Wanted) -> int:
    """Redraw the table until Ctrl-C; raise UserError without a terminal."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        raise UserError("--watch needs a terminal; without it the table is printed once")
    try:
        while True:
            text = _text(wanted)
            clock = time.strftime("%H:%M:%S")
            height = shutil.get_terminal_size().lines
            print(_CLEAR + "\n".join([*text[: height - 2], f"{clock}  Ctrl-C ends"]), flush=True)
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        return 0
