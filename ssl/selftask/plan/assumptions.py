"""Assumptions of a plan that are not in the config: ``memory=80GB mtbf=24h images_per_s=12k``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from selftask.config.values.budget import parse_budget
from selftask.errors import UserError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)")
_COUNT_UNITS = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_TIME_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "day": 86_400, "days": 86_400}


@dataclass(frozen=True)
class Assumptions:
    """Properties of data and machines that are not in a config.

    Args:
        samples: Number of training images; None to count those of ``data``.
        side: Height and width of images in pixels, for views that keep their size. None takes the
            longer side of the first image.
        classes: Number of classes. None takes that of the data, or 1000 with ``samples``.
        channels: Number of image channels; None: that of the data, with ``samples`` 3.
        memory: Memory of a rank's device in bytes; None if unknown.
        mtbf: Mean time between failures of one node, in seconds.
        write_speed: Speed at which checkpoints are written, in bytes per second.
        images_per_s: Throughput of all ranks in images per second; None if unknown.
        measured_on: Device on which the throughput of one rank was measured; None if it was given
            or is unknown.
        price_per_hour: Price of one rank for an hour, in any currency; None if unknown.
    """

    samples: int | None = None
    side: int | None = None
    classes: int | None = None
    channels: int | None = None
    memory: float | None = None
    mtbf: float = 30 * 86_400.0
    write_speed: float = 1e9
    images_per_s: float | None = None
    measured_on: str | None = None
    price_per_hour: float | None = None


def take_assumptions(words: list[str]) -> tuple[list[str], Assumptions]:
    """Split ``key=value`` words into overrides of the config and assumptions of the plan.

    Returns:
        The words whose key is not that of an assumption, and the assumptions.

    Raises:
        UserError: If the value of an assumption is invalid.
    """
    rest: list[str] = []
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in _READERS:
            rest.append(word)
            continue
        read, expected = _READERS[key]
        try:
            values[key] = read(text.strip())
        except ValueError:
            raise UserError(f"command line: {word}: expected {expected}") from None
    return rest, replace(Assumptions(), **values)


def _count(text: str) -> int:
    if number := round(_quantity(text, _COUNT_UNITS)):
        return number
    raise ValueError(text)


def _quantity(text: str, units: Mapping[str, float]) -> float:
    """Return a number above 0 times its unit; raise ValueError for another text."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise ValueError(text)
    return float(match[1]) * units[match[2]]


def _bytes(text: str) -> float:
    budget = parse_budget(text.removesuffix("/s"))
    if budget.unit != "byte" or budget.value == 0:
        raise ValueError(text)
    return budget.value


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "samples": (_count, "a number of images, such as 1.28M or 50000"),
    "side": (_count, "a number of pixels, such as 224"),
    "classes": (_count, "a number of classes, such as 1000"),
    "channels": (_count, "a number of channels, such as 3"),
    "memory": (_bytes, "the memory of a device, such as 80GB or 24GiB"),
    "mtbf": (
        partial(_quantity, units=_TIME_UNITS),
        "a time with its unit, such as 24h, 90min or 30d",
    ),
    "write_speed": (_bytes, "bytes a second, such as 2GB or 500MB"),
    "images_per_s": (
        partial(_quantity, units=_COUNT_UNITS),
        "images a second of all ranks, such as 1200 or 12k",
    ),
    "price_per_hour": (partial(_quantity, units={"": 1}), "a price above 0, such as 2.50"),
}
