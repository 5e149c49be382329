"""Find the run folders that a user names."""

from __future__ import annotations

from pathlib import Path

from selftask.errors import UserError, nearest_path
from selftask.files.paths import is_folder
from selftask.report.overview.find import find_runs
from selftask.report.record import is_run


def runs_in(place: Path) -> list[Path]:
    """Return the given run folder, or all run folders below it.

    Raises:
        UserError: If there are none.
    """
    if not is_folder(place):
        raise UserError(f"{place}: there is no such run; {nearest_path(place)}")
    if is_run(place):
        return [place]
    runs = find_runs(place).runs
    if not runs:
        raise UserError(f"{place}: not a run folder, and there are no runs below it")
    return runs
