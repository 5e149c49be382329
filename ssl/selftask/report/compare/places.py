"""Find run folders in and below a folder given by the user."""

from __future__ import annotations

from pathlib import Path

from selftask.errors import UserError, nearest_path
from selftask.files.paths import is_folder
from selftask.report.overview.find import find_runs
from selftask.report.record import is_run


def runs_in(folder: Path) -> list[Path]:
    """Return ``folder`` if it is a run folder, or else all run folders below it.

    Raises:
        UserError: If there are none.
    """
    if not is_folder(folder):
        raise UserError(f"{folder}: there is no such run; {nearest_path(folder)}")
    if is_run(folder):
        return [folder]
    runs = find_runs(folder).runs
    if not runs:
        raise UserError(f"{folder}: not a run folder, and there are no runs below it")
    return runs
