"""``selftask jobs``: show the state of submitted runs."""

from __future__ import annotations

from pathlib import Path

from selftask.cli.options import take_options
from selftask.errors import aligned, printable_line
from selftask.report.overview.table import short_path
from selftask.slurm.queue import as_completed, find, run_lines

USAGE = """\
usage: selftask jobs [OUT ...] [--wait]

State, step and last line of each submitted run: of the runs and sweeps in OUT, or of all that
lie in runs/. Then those of `eval suite --slurm`, whose last line is that of the job's error log.
--wait       waits for all jobs to end, prints each when it does; fails unless all have finished"""

FINISHED = ("finished", "ended", "completed")  # states of runs, and of jobs of `eval suite`


def main(argv: list[str]) -> int:
    """Print a table with one line per run; with ``--wait``, a line for each job that ends.

    With ``--wait``, return 1 if a job has not finished successfully.
    """
    words, options = take_options(argv, {"--wait": bool})
    outs = find([Path(word) for word in words])
    if options.get("--wait"):
        unfinished = 0
        for run in as_completed(outs):
            shown = (run.job, short_path(run.folder), run.state, run.last_line or run.note)
            print("  ".join(map(printable_line, shown)), flush=True)
            unfinished += run.state not in FINISHED
        return 1 if unfinished else 0
    runs = run_lines(outs)
    if not runs:
        print("no submitted runs in runs/; selftask jobs OUT looks elsewhere")
        return 0
    rows: list[tuple[str, ...]] = [("JOB", "RUN", "STEP", "STATE", "LAST LINE")]
    for run in runs:
        step = "-" if run.step is None else str(run.step)
        cells = (run.job or "-", short_path(run.folder), step, run.state, run.last_line or run.note)
        rows.append(tuple(map(printable_line, cells)))
    print("\n".join(aligned(rows)))
    return 0
