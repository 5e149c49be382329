"""Write ``report.html`` at the end of a run. A failure is logged and has no other effect."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from selftask.logs import get_logger

if TYPE_CHECKING:
    from selftask.report.page import Section
    from selftask.task import Task

log = get_logger(__name__)

LIMIT_S = 20.0  # usually it takes less than a second, but a file server may hang


def write_end_page(
    folder: Path,
    *,
    limit_s: float = LIMIT_S,
    task: Task | None = None,
    images_s: float = 0.0,
) -> None:
    """Write the report of a run that has ended; log a warning if that fails or takes too long.

    Args:
        folder: The run folder.
        limit_s: Time limit for the report without images, in seconds.
        task: The finished task, whose images are shown; None for no images.
        images_s: Additional time limit for the images, in seconds.
    """
    problems: list[str] = []

    def write() -> None:
        from selftask.report.record import RunRecord
        from selftask.report.run_report import write_run_report

        try:
            more = [] if task is None else _images(task, images_s)
            write_run_report(RunRecord.read(folder), more=more)
        except Exception as error:  # noqa: BLE001 - the run has already ended
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=write, name="selftask report", daemon=True)
    try:
        thread.start()
        thread.join(limit_s + images_s)
        if thread.is_alive():
            problems.append(f"not written within {limit_s + images_s:g} s")
    except KeyboardInterrupt:
        problems.append("interrupted")
    if problems:
        log.warning("no report of this run (%s); selftask report %s", problems[0], folder)


def _images(task: Task, seconds: float) -> list[Section]:
    """Return the sections with images; log a warning and return none if they fail."""
    from selftask.report.images.sections import ImageSections

    try:
        return ImageSections(run=task.out, limit_s=seconds, trust=True, task=task).make()
    except Exception as error:  # noqa: BLE001 - the run has already finished
        log.warning("no images in the report (%s: %s)", type(error).__name__, error)
        return []
