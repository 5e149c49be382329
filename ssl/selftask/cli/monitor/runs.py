"""``selftask runs``: print a table of all runs below a folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from selftask.cli.options import take_keys, take_options
from selftask.errors import UserError, printable_line, with_noun
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
_CLEAR = "\x1b[H\x1b[J"


def main(argv: list[str]) -> int:
    """Print the table of runs; with ``--watch``, redraw it until Ctrl-C."""
    words, options = take_options(argv, {"--json": bool, "--watch": bool})
    names, values = take_keys(words, {"sort": "", "state": "", "columns": ""})
    folders = [folder_of(name) for name in names or ["runs"]]
    states, columns = (list(filter(None, values[k].split(","))) for k in ("state", "columns"))

    def lines() -> list[RunLine]:
        chosen = with_states(lines_of(folders), states)
        return sort_by(chosen, values["sort"]) if values["sort"] else chosen

    def text() -> list[str]:
        where = ", ".join(map(str, folders)) + (" in this state" if states else "")
        return _text(listed, columns) if (listed := lines()) else [f"no runs in {where}"]

    if options.get("--json"):
        print(json.dumps([as_json(line) for line in lines()], indent=1))
    elif options.get("--watch"):
        _watch(text)
    else:
        print("\n".join(text()))
    return 0


def folder_of(word: str, command: str = "runs") -> Path:
    """Return the local folder that a word names; raise UserError if there is none.

    Args:
        word: A word of the command line.
        command: Name of the command, for messages.
    """
    if is_remote(word):
        raise UserError(f"{word}: an address; copy its runs to a folder, or name a local one")
    if not paths.is_folder(word):
        hint = "there are no runs here yet" if word == "runs" else "no such folder"
        raise UserError(f"{word}: {hint}; selftask {command} DIR looks in DIR")
    return Path(word)


def lines_of(folders: list[Path]) -> list[RunLine]:
    """Return a line for each run in or below the folders, with the state of its job if it has one.

    Runs that submissions below the folders have recorded are included, and so is a line for each
    record that cannot be read.
    """
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


def _text(lines: list[RunLine], columns: list[str]) -> list[str]:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    counts = f"{with_noun(len(lines), 'run')}: {count_states(lines)}"
    return [*text_table(lines, columns_of(lines, columns), width), printable_line(counts)]


def _watch(text: Callable[[], list[str]]) -> None:
    """Redraw the table until Ctrl-C; raise UserError without a terminal."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        raise UserError("--watch needs a terminal; without it the table is printed once")
    with suppress(KeyboardInterrupt):
        while True:
            shown = text()[: shutil.get_terminal_size().lines - 2]
            clock = time.strftime("%H:%M:%S")
            print(_CLEAR + "\n".join([*shown, f"{clock}  Ctrl-C ends"]), flush=True)
            time.sleep(REFRESH_S)
