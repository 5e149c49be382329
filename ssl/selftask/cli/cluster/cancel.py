"""``selftask cancel``: cancel the jobs of submitted runs."""

from __future__ import annotations

import re
from pathlib import Path

from selftask.errors import UserError
from selftask.files.paths import exists
from selftask.slurm import queue

USAGE = """\
usage: selftask cancel OUT|JOBID [...]

Cancels the jobs of the run or sweep in OUT, also those of `eval suite`, or a job by its id. A
running job saves a checkpoint first; the same `selftask submit` command resumes it."""


def main(argv: list[str]) -> int:
    """Cancel the jobs and print their ids; without words, print the usage and return 2."""
    if not argv:
        print(USAGE)
        return 2
    for word in argv:
        if re.fullmatch(r"\d+(_\d+)?", word) and not exists(word):
            jobs: dict[str, Path | None] = {word: None}
        else:
            jobs = queue.jobs_to_cancel(Path(word))
            if not jobs:
                raise UserError(f"{word}: neither a job's id nor a submitted run or sweep")
        queue.cancel(jobs)
        print(f"cancelled {', '.join(jobs)}")
    return 0
