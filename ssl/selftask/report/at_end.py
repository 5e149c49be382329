"""Write ``report.html`` at the end of a run. A failure is logged and has no other effect."""

from __future__ import annotations

import threading
from pathlib import Path

from selftask.logs import get_logger

log = get_logger(__name__)

LIMIT_S = 20.0  # usually it takes less than a second, but a file server may hang


def write_end_page(folder: Path, limit_s: float = LIMIT_S) -> None:
    """Write the report of a run that has ended; log a warning if that fails or takes too long.

    Args:
        folder: The run folder.
        limit_s: Time limit in seconds.
    """
    problems: list[str] = []

    def write() -> None:
        from selftask.report.record import RunRecord
        from selftask.report.run_report import write_run_report

        try:
            write_run_report(RunRecord.read(folder))
        except Exception as error:  # noqa: BLE001 - the run has already ended
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=write, name="selftask report", daemon=True)
    try:
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            problems.append(f"not written within {limit_s:g} s")
    except KeyboardInterrupt:
        problems.append("interrupted")
    if problems:
        log.warning("no report of this run (%s); selftask report %s", problems[0], folder)
