"""``selftask jobs``: show the state of submitted runs."""

from __future__ import annotations

from pathlib import Path

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
    rows = [("JOB", "RUN", "STEP", "STATE")]
    rows += [
        (run.job, short_path(run.folder), "-" if run.step is None else str(run.step), run.state)
        for run in runs
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row, last in zip(rows, ["LAST LINE", *(run.last_line for run in runs)], strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([*cells, last]).rstrip())
    return 0
