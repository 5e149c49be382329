"""``selftask eval suite``: run the same evaluations for all checkpoints of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from selftask.checkpoint.rotation import checkpoints, step_of
from selftask.cli.model.suite_request import Request, read_request
from selftask.cli.options import needs_first, take_options
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.trust import TRUST
from selftask.errors import UserError, aligned
from selftask.logs import announce

if TYPE_CHECKING:
    from selftask.logs.checkpoint_results import CheckpointResults

USAGE = f"""\
usage: selftask eval suite RUN [EVALUATION ...] [key=value ...]
                           [--follow] [--slurm | --slurm-each]

Evaluates the checkpoints of a run and prints a table of their metrics. Results are kept in
RUN/evaluations; what is there already is not computed again.
EVALUATION    knn, linear, svm or one of your own; default: those of the run. Their fields have
              the name in front: knn.k=[5,20]
data=DIR data.val=DIR   the labeled images; default: those of the run
checkpoints=all         or last, best (by train.keep_best), or a pattern of steps: 1?00
every=N       only those of steps that N divides
weights=ema   the average that hooks.ema (swa) keeps, instead of the trained weights
--follow      evaluates new checkpoints as they appear, until the run has ended; with --slurm
              the job does
--slurm       as one job, by launch.slurm.* of the run or the command line; the same command without
              it prints the table. --slurm-each: one job for each checkpoint, as an array.
              `selftask cancel JOBID` takes it out of the queue
{TRUST}
{VERBOSITY}"""

OPTIONS = {"--follow": bool, "--slurm": bool, "--slurm-each": bool}
_POLL_S = 10.0  # interval between checks for new checkpoints with --follow


def main(argv: list[str]) -> int:
    """Evaluate and print the table, or submit a job that evaluates."""
    words, options = take_options(argv, OPTIONS)
    if "--slurm-each" in options and len(options) > 1:
        raise UserError("eval suite: --slurm-each excludes --slurm and --follow; give one of them")
    needs_first(words, "eval suite needs a RUN", USAGE)
    request, config = read_request(words)
    follow, each = "--follow" in options, "--slurm-each" in options
    if each or "--slurm" in options:
        from selftask.cli.model.suite_job import submit_suite

        job = submit_suite(request, config, each=each, follow=follow)
        print(f"submitted as job {job}; the same command without --slurm prints the table")
        return 0
    from selftask.logs.checkpoint_results import CheckpointResults

    results = CheckpointResults(request.run, request.settings)
    _evaluate(request, results, follow=follow)
    _print_table(request, results)
    return 0


def _evaluate(request: Request, results: CheckpointResults, *, follow: bool) -> None:
    """Run the evaluations that have no result yet; with ``follow``, also those of new checkpoints
    until the run ends.
    """
    from selftask.report.overview.run_line import read_line

    while True:
        goes_on = follow and read_line(request.run).state in ("running", "hung", "requeued")
        paths = request.chosen()
        for path in paths:
            missing = results.missing(step_of(path), request.evaluations)
            if missing:
                _evaluate_one(request, path, missing, results)
        if not goes_on:
            return
        time.sleep(_POLL_S)


def _print_table(request: Request, results: CheckpointResults) -> None:
    """Print the metrics by step; raise UserError if there are none."""
    table = results.table()
    if not table:
        there = ", ".join(str(step_of(p)) for p in checkpoints(request.run / "checkpoints"))
        raise UserError(
            f"checkpoints={request.checkpoints}: {request.run} has no such checkpoint; there are: "
            f"{there or 'none'}"
        )
    names = list(dict.fromkeys(name for row in table.values() for name in row))
    rows = [["step", *names]]
    for step, row in table.items():
        cells = (row.get(name) for name in names)
        rows.append([str(step), *("-" if cell is None else f"{cell:.4f}" for cell in cells)])
    print("\n".join(aligned(rows, right=range(len(rows[0])))))


def _evaluate_one(
    request: Request, path: Path, evaluations: list[str], results: CheckpointResults
) -> None:
    """Evaluate one checkpoint and store its metrics; skip it if the run has removed it."""
    from selftask.cli.model.checkpoint_model import open_checkpoint
    from selftask.cli.model.evaluate import evaluate_frozen

    results.check_writable()
    announce(f"step {step_of(path)}: {', '.join(evaluations)}")
    try:
        frozen = open_checkpoint(path, request.overrides(evaluations))
    except (OSError, UserError):
        if path.exists():
            raise
        announce(f"step {step_of(path)}: the run has removed this checkpoint meanwhile")
        return
    results.add(step_of(path), evaluations, evaluate_frozen(evaluations, frozen, tell=announce))
