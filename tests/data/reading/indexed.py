"""What tests of lists of paths share."""

from __future__ import annotations

from selftask.data.reading.index import Index

LONG_AGO = 1_000_000_000  # a time of change that is believed: older than any clock's tick


def paths_of(index: Index) -> list[str]:
    """All paths of an index, in its order."""
    table = index.paths
    return [table[number] for number in range(len(table))]
