"""Write the ``report.html`` of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from selftask.report.curves import curves_section
from selftask.report.event_list import events_section
from selftask.report.header import facts_section, files_section, head_html
from selftask.report.layers import layers_section
from selftask.report.page import Section, write_page
from selftask.report.record import RunRecord
from selftask.report.settings import config_section
from selftask.report.time_spent import time_section

NAME = "report.html"


def run_sections(record: RunRecord, page: Path) -> list[Section]:
    """Return the sections of a run's page that need neither its data nor its weights.

    Args:
        record: The run.
        page: The file that the sections are written to; links are relative to it.
    """
    return [
        curves_section(record),
        layers_section(record),
        facts_section(record),
        time_section(record),
        events_section(record),
        config_section(record),
        files_section(record, page),
    ]


def write_run_report(
    record: RunRecord, path: Path | None = None, *, more: Sequence[Section] = ()
) -> Path:
    """Write the page of a run and return its path.

    Args:
        record: The run.
        path: The file to write. Default: ``report.html`` in the run folder.
        more: Additional sections, after the curves.

    Raises:
        OSError: If the file cannot be written.
    """
    path = path or record.folder / NAME
    first, *rest = run_sections(record, path)
    sections = [first, *more, *rest]
    write_page(path, f"{record.name}: selftask", sections, top=head_html(record))
    return path
