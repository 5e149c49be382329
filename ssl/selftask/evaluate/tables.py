"""Tables of users: CSV files with a header."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from selftask.errors import UserError, explained, with_noun


def read_rows(
    path: Path, columns: Sequence[str], prefix: str, delimiter: str = ","
) -> list[dict[str, str]]:
    """Return the rows of a table as dicts of column -> cell; missing cells are empty.

    Args:
        path: The file, in UTF-8.
        columns: Columns that the file must have.
        prefix: Beginning of the error messages, such as ``classes=FILE``.
        delimiter: Character between cells.

    Raises:
        UserError: If the file is not a table, has no rows, or lacks a column.
    """
    with (
        explained(f"{prefix}: is no table", OSError, UnicodeError, csv.Error),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.DictReader(file, delimiter=delimiter, restval="")
        header, rows = reader.fieldnames or (), list(reader)
    if not rows or not {*columns} <= {*header}:
        there = f"{','.join(header)!r:.100} and {with_noun(len(rows), 'row')}"
        raise UserError(f"{prefix}: expected the columns {','.join(columns)} and rows; has {there}")
    return rows
