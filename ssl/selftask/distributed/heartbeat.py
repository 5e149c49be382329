"""Signs of life: what this process is doing, for whoever watches whether it still moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Heartbeat:
    """What the main thread does just now, and a count that grows whenever it moves on.

    Written by the main thread only; a watching thread reads it without a lock.
    """

    def __init__(self) -> None:
        self.count = 0
        self.doing = "training"
        self.collectives = 0  # begun so far: who has begun fewer than the others is missing
        self.waits = False  # in one of them
        self.step = 0


HEARTBEAT = Heartbeat()


class activity:
    """Context: the main thread does this; beginning and end both count as moving on."""

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
    """The items of a long loop; the main thread is ``doing`` something, and each is a sign of life.

    Whoever watches takes a process that gives none for ``launch.hang_timeout_s`` for stuck.
    """
    for item in items:
        with activity(doing):
            yield item


class collective_activity(activity):
    """The same for what all ranks must do together; numbered, so that they can be compared."""

    def __enter__(self) -> None:
        super().__enter__()
        HEARTBEAT.collectives += 1
        HEARTBEAT.waits = True

    def __exit__(self, *error: object) -> None:
        HEARTBEAT.waits = False
        super().__exit__(*error)
