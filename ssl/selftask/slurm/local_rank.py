"""One rank of a local job: ``python -m selftask.slurm.local_rank FOLDER``, run by submitit.

If the job ends before its run has begun (its pickle, config or data cannot be read), this module
writes a status and a last log line. On SLURM, the epilogue of the batch script does this.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from submitit.core.submission import submitit_main

from selftask.distributed.world import read_world
from selftask.errors import message_of

OUT = "SELFTASK_OUT"  # environment variable with the run folder, set at submission


def main() -> None:
    """Run submitit's entry point; record an error that occurs before the run begins."""
    try:
        submitit_main()
    except Exception as error:
        _record(Path(os.environ[OUT]), error)
        raise


def _record(out: Path, error: Exception) -> None:
    """Write status and log line of a failure, unless the run has done so itself."""
    from selftask.slurm.batch_epilogue import Record

    record = Record(out, read_world().attempt)
    # the run has recorded its own end; "requeued" is from the previous attempt
    if record.state not in (None, "requeued"):
        return
    text = "; ".join(message_of(error).splitlines())
    where = {"attempt": record.attempt, "host": socket.gethostname(), "pid": os.getpid()}
    record.write("failed", f"RUN FAILED before it began: {text}", error=text, **where)


if __name__ == "__main__":
    main()
