"""``selftask jobs``: show the state of submitted runs."""

from __future__ import annotations

from pathlib import Path

from selftask.cli.options import columns
from selftask.errors import printable_line
from selftask.report.overview.table import short_path
from selftask.slurm.queue import find, stand

USAGE = """\
usage: selftask jobs [OUT ...]

State, step and last line of each submitted run: of the runs and sweeps in OUT, or of all that
lie in runs/. Then those of `eval suite --slurm`, whose last line is that of the job's error log."""


def main(argv: list[str]) -> int:
    """Print a table with one line per run."""
    runs = stand(find([Path(word) for word in argv]))
    if not runs:
        print("no submitted runs in runs/; selftask jobs OUT looks elsewhere")
        return 0
    rows: list[tuple[str, ...]] = [("JOB", "RUN", "STEP", "STATE", "LAST LINE")]
    for run in runs:
        step = "-" if run.step is None else str(run.step)
        cells = (run.job or "-", short_path(run.folder), step, run.state, run.last_line or run.note)
        rows.append(tuple(map(printable_line, cells)))
    print("\n".join(columns(rows)))
    return 0
