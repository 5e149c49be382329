"""Memory budgets: ``8 GB``, or a share of all activations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from selftask.errors import nearest

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]i?B)?\s*")
_WORDS = ("none", "blocks")


@dataclass(frozen=True)
class Budget:
    """``value`` bytes, or ``value`` as a share of the bytes that are kept without a budget."""

    value: float
    unit: Literal["byte", "share"]

    def limit(self, total: int) -> int:
        """Return the budget in bytes, given the ``total`` bytes that are kept without a budget."""
        return int(self.value if self.unit == "byte" else self.value * total)


def show_bytes(size: float) -> str:
    """Format bytes as ``1.5 GB`` or ``20.0 MB``, which ``parse_budget`` accepts."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def parse_budget(text: float | str) -> Budget:
    """Parse ``8 GB``, ``512 MiB`` (K, M, G, T) or a share from 0 to 1.

    Raises:
        ValueError: For any other text; the message has the accepted forms.
    """
    match = _PATTERN.fullmatch(str(text))
    if match is None:
        hint = nearest(str(text), _WORDS)
        raise ValueError(
            "not a budget: write none, blocks, a size such as '8 GB', or the share of activations "
            "that may be kept, from 0 to 1" + (f"; {hint}" if hint.startswith("did") else "")
        )
    value, unit = float(match[1]), match[2]
    if unit is None:
        if value > 1:
            raise ValueError(f"a share is at most 1; for a size say what of: '{value:g} GB'")
        return Budget(value, "share")
    base = 1024 if "i" in unit else 1000
    return Budget(value * base ** ("KMGT".index(unit[0]) + 1), "byte")
