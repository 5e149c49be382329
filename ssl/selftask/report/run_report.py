"""``report.html`` of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from selftask.report.curves import curves_section
from selftask.report.header import head_html
from selftask.report.page import Section, write_page
from selftask.report.record import RunRecord

NAME = "report.html"


def run_sections(record: RunRecord) -> list[Section]:
    """Return the sections of a run's page that need its files only, not its data or weights."""
    return [curves_section(record)]


def write_run_report(
    record: RunRecord, path: Path | None = None, *, more: Sequence[Section] = ()
) -> Path:
    """Write the page of a run and return its path.

    Args:
        record: The run.
        path: The file. Default: ``report.html`` in the run folder.
        more: Further sections, after the curves.

    Raises:
        OSError: If the file cannot be written.
    """
    path = path or record.folder / NAME
    first, *rest = run_sections(record)
    write_page(path, f"{record.name}: selftask", [first, *more, *rest], top=head_html(record))
    return path
