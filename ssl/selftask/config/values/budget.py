"""Memory budgets, such as ``8 GB`` or a share of all activations; bytes and counts as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from selftask.errors import close_name

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kKMGT]i?B)?\s*")
WORDS = ("none", "blocks")  # in place of a budget: keep all activations, or inputs of blocks


@dataclass(frozen=True)
class Budget:
    """Memory budget: ``value`` bytes, or a share ``value`` of the bytes kept without a budget."""

    value: float
    unit: Literal["byte", "share"]

    def limit(self, total: int) -> int:
        """Return the budget in bytes, given the ``total`` bytes that are kept without a budget."""
        return int(self.value if self.unit == "byte" else self.value * total)


def show_bytes(size: float) -> str:
    """Format bytes: ``640 B``, ``3.1 kB``, ``20.0 MB``, ``1.5 GB``, ``2.1 TB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"


def show_count(number: float, digits: int = 4) -> str:
    """Format a number with at most ``digits`` significant digits: ``12``, ``697 k``, ``23.5 M``.

    Numbers from 1e15 on are written like ``2.30e+21``.
    """
    if number >= 1e15:
        return f"{number:.2e}"
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        text = f"{number / size:.{digits}g}"
        if float(text) >= 1:  # what would round up to 1000 takes the next unit
            return text + unit
    return f"{number:.{digits}g}"


def parse_budget(text: float | str) -> Budget:
    """Parse ``8 GB``, ``512 MiB`` (K, M, G, T) or a share from 0 to 1.

    A size without a unit is a share.

    Raises:
        ValueError: For any other text, and for a share above 1.
    """
    match = _PATTERN.fullmatch(str(text))
    if match is None:
        close = close_name(str(text), WORDS)
        raise ValueError(
            f"not a budget: write {', '.join(WORDS)}, a size such as '8 GB', or the share of "
            "activations that may be kept, from 0 to 1"
            + (f"; did you mean {close!r}?" if close else "")
        )
    value, unit = float(match[1]), match[2]
    if unit is None:
        if value > 1:
            raise ValueError(f"a share is at most 1; for a size say what of: '{value:g} GB'")
        return Budget(value, "share")
    base = 1024 if "i" in unit else 1000
    return Budget(value * base ** ("KMGT".index(unit[0].upper()) + 1), "byte")
