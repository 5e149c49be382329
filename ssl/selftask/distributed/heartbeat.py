"""Heartbeat of this process: its current activity and progress, read by the watchdog."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Heartbeat:
    """Current activity of the main thread, with a counter that increases on progress.

    Only the main thread writes it. The watchdog thread reads it without a lock.
    """

    def __init__(self) -> None:
        self.count = 0
        self.doing = "training"
        self.collectives = 0  # number started; a rank with fewer than the others is missing
        self.waits = False  # True inside a collective
        self.step = 0


HEARTBEAT = Heartbeat()


class activity:
    """Context that names the activity of the main thread; entry and exit count as progress."""

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        self.before = HEARTBEAT.doing
        HEARTBEAT.doing = self.doing
        HEARTBEAT.count += 1

    def __exit__(self, *error: object) -> None:
        HEARTBEAT.doing = self.before
        HEARTBEAT.count += 1


def track(doing: str, items: Iterable[T]) -> Iterator[T]:
    """Yield the items of a long loop, with one heartbeat per item.

    The watchdog ends a run that makes no progress for ``launch.hang_timeout_s``.

    Args:
        doing: Name of the activity, for the watchdog's report.
        items: Items to iterate over.
    """
    for item in items:
        with activity(doing):
            yield item


class collective_activity(activity):
    """``activity`` that counts as a collective; the watchdog compares the counts of all ranks."""

    def __enter__(self) -> None:
        super().__enter__()
        HEARTBEAT.collectives += 1
        HEARTBEAT.waits = True

    def __exit__(self, *error: object) -> None:
        HEARTBEAT.waits = False
        super().__exit__(*error)
