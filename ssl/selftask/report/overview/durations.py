"""Format lengths of time: ``12 s``, ``3 min``, ``5 h 20 min``."""

from __future__ import annotations


def show_seconds(seconds: float) -> str:
    """Format a duration, rounded to seconds below 1 min, to minutes below 1 day, else to hours."""
    rounded = max(0, round(seconds))
    if rounded < 60:
        return f"{rounded} s"
    minutes = round(rounded / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(rounded / 3600), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
