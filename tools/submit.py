"""Submit from a checkout: ``python tools/submit.py simclr launch.nodes=2 out=runs/mine``.

The steps of ``selftask submit``, as a script to modify.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ssl"))

from selftask.cli.main import guarded
from selftask.slurm.plan import plan


def main(argv: list[str]) -> int:
    """Print the plan and submit it; with --dry-run print the sbatch script instead."""
    words = [word for word in argv if word != "--dry-run"]
    planned = plan(words[0] if words else "simclr", words[1:])
    print(planned.describe())
    if "--dry-run" in argv:
        print(planned.script())
        return 0
    for job in planned.submit():
        print(f"submitted as job {job.job_id}, logs in {planned.out / 'slurm'}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
