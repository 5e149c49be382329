"""``selftask submit``: train a recipe on a SLURM cluster."""

from __future__ import annotations

import shlex
from pathlib import Path

from selftask.cli.options import needs_first, take_options
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.errors import UserError, check_known
from selftask.logs import announce

USAGE = f"""\
usage: selftask submit RECIPE [key=value ...] [--dry-run]

Checks everything on this machine, prints the plan and hands the run to SLURM (through submitit):
  launch.nodes=2 launch.processes=8        ranks: processes on each node
  launch.slurm.partition=gpu               any option of sbatch, - or _ in its name
  launch.slurm.time=36:00:00               as sbatch has it: minutes, h:mm:ss, days-hours
  train.seed=1,2,3                         a comma list is a sweep: a job array, a folder each
--dry-run prints the sbatch script instead of submitting it. Then: selftask jobs OUT
--cluster local starts the same job on this machine, in the background; --cluster debug trains in
this process, and an exception opens pdb. Neither goes with --dry-run.
{VERBOSITY}"""

OPTIONS = {"--dry-run": bool, "--cluster": str}
CLUSTERS = ("slurm", "local", "debug")


def main(argv: list[str]) -> int:
    """Check the config, print the plan and submit the job, or print its script instead."""
    words, options = take_options(argv, OPTIONS)
    needs_first(words, "submit needs a RECIPE", USAGE)
    cluster = options.get("--cluster", "slurm")
    check_known(cluster, CLUSTERS, f"--cluster {cluster}: there is no such kind")
    if cluster != "slurm":
        if options.get("--dry-run"):
            raise UserError(f"--dry-run: --cluster {cluster} has no sbatch script; take one out")
        return _submit_here(words, cluster)
    from selftask.slurm.plan import plan

    planned = plan(words[0], words[1:])
    announce(planned.describe())
    if options.get("--dry-run"):
        announce("")
        print(planned.script())
        return 0
    made = planned.submit()
    ids = made[0].job_id.partition("_")[0]
    _print_submitted(f"submitted as job {ids}", planned.out)
    return 0


def _submit_here(words: list[str], cluster: str) -> int:
    """Start local jobs, or for ``debug`` train in this process under a debugger."""
    from selftask.slurm import local_job, queue
    from selftask.slurm.plan import read_local

    configs, submissions = read_local(words[0], words[1:])
    if cluster == "debug":
        local_job.run_in_debugger(configs, submissions)
        return 0
    outs = [Path(submission.out) for submission in submissions]
    base = outs[0] if len(outs) == 1 else outs[0].parent
    jobs = local_job.submit_locally(configs, submissions, base / "slurm")
    queue.note(base, dict(zip(outs, jobs, strict=True)))
    _print_submitted(f"started {', '.join(jobs)}", base)
    return 0


def _print_submitted(done: str, out: Path | str) -> None:
    """Print the last line of the output; its command is quoted for the shell."""
    print(f"{done}; `selftask jobs {shlex.quote(str(out))}` shows how it stands")
