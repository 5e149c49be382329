"""History of each logged column, for hooks that depend on earlier values."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from selftask.errors import nearest
from selftask.logs.rows import is_measured

LENGTH = 200  # number of values kept for a column


class Series:
    """The last 200 values of one column and their steps, oldest first.

    A ``window`` is the number of newest values to use. None, 0, or more than there are uses all
    values that are kept. Methods for the newest value, mean, median, minimum and maximum need at
    least one value.
    """

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=LENGTH)
        self.values: deque[float] = deque(maxlen=LENGTH)

    def add(self, step: int, value: float) -> None:
        """Add a value; it replaces an earlier one of the same step."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
            return
        self.steps.append(step)
        self.values.append(value)

    def last(self, window: int | None = None) -> list[float]:
        """Return the newest ``window`` values, oldest first; all that are kept if it is None."""
        return list(self.values)[-window:] if window else list(self.values)

    def count(self, steps: int) -> int:
        """Return the number of values in the ``steps`` steps up to the newest value's.

        The result can be used as a window.
        """
        return sum(step > self.steps[-1] - steps for step in self.steps)

    @property
    def latest(self) -> float:
        """The newest value."""
        return self.values[-1]

    def mean(self, window: int | None = None) -> float:
        return statistics.fmean(self.last(window))

    def median(self, window: int | None = None) -> float:
        return statistics.median(self.last(window))

    def min(self, window: int | None = None) -> float:
        return min(self.last(window))

    def max(self, window: int | None = None) -> float:
        return max(self.last(window))


class History(Mapping[str, Series]):
    """Latest values of each column, by name: ``task.history["loss"].median(20)``.

    The last 200 values of each column are kept on every rank. They are saved in checkpoints, except
    for measurements of time and memory, such as ``images_per_s``.
    """

    def __init__(self) -> None:
        self._columns: defaultdict[str, Series] = defaultdict(Series)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of a row, which must have a ``step``; other values are ignored."""
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._columns[name].add(row["step"], float(value))

    def __getitem__(self, name: str) -> Series:
        if name not in self._columns:
            raise KeyError(f"no column {name!r} in the rows so far; {nearest(name, self._columns)}")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def state_dict(self) -> dict[str, Any]:
        """Return all columns as tensors, except measurements of time and memory."""
        return {
            name: {
                "steps": torch.tensor(list(column.steps)),
                "values": torch.tensor(list(column.values), dtype=torch.float64),
            }
            for name, column in self._columns.items()
            if not is_measured(name)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._columns.clear()
        for name, column in state.items():
            series = self._columns[name] = Series()
            series.steps.extend(column["steps"].tolist())
            series.values.extend(column["values"].tolist())
