"""A step counter that records the numbers to which a method compares it: ``steps_done >= 5``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selftask.config.compose.provenance import show_path

_PACKAGE = Path(__file__).resolve().parents[1]


def _recorded(compare: Callable[[int, Any], bool]) -> Any:
    """Return a method that calls ``_record`` and then ``compare``."""

    def compared(steps: WatchedSteps, other: Any) -> bool:
        steps._record(other)
        return compare(steps, other)

    return compared


class WatchedSteps(int):
    """Number of finished steps, which records its comparisons with integers in ``asked``.

    Comparisons in selftask's own files are recorded only in its methods.
    """

    asked: dict[str, int]  # file:line -> the largest number that it was compared with there

    def __new__(cls, value: int, asked: dict[str, int]) -> WatchedSteps:
        """Return ``value`` as a number that records its comparisons in ``asked``."""
        number = super().__new__(cls, value)
        number.asked = asked
        return number

    def _record(self, other: Any) -> None:
        if not isinstance(other, int):
            return
        frame = sys._getframe(2)
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "methods"):
            return
        line = f"{show_path(path)}:{frame.f_lineno}"
        self.asked[line] = max(other, self.asked.get(line, 0))

    __lt__ = _recorded(int.__lt__)
    __le__ = _recorded(int.__le__)
    __gt__ = _recorded(int.__gt__)
    __ge__ = _recorded(int.__ge__)
    __eq__ = _recorded(int.__eq__)
    __hash__ = int.__hash__
