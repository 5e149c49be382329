"""Streams, events and memory of the imagined device; what reads too early or frees too early.

Nothing runs asynchronously. Operations are numbered by stream, and a stream remembers up to which
operation of another one it has waited. An operation on memory that a later operation of another
stream wrote is a race, and so is memory that is freed while another stream may still use it.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_REPOSITORY = str(Path(__file__).resolve().parents[1])
_HELPERS = tuple(
    f"imagined_{name}.py" for name in ("autocast", "device", "losses", "ranks", "streams")
)
entered: list[Any] = []  # contexts whose ``waits`` and ``races`` are reported to


class Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or streams[-1]
        self.clock = {**self.stream.waited_for, self.stream: self.stream.launched}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or streams[-1]).wait_event(self)

    def synchronize(self) -> None:
        for stream, number in self.clock.items():
            stream.finished = max(stream.finished, number)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.launched = 0  # number of the last operation
        self.freed: list[tuple[Stream, int, str]] = []  # uses of freed memory by other streams
        self.finished = 0  # number of the last one that the host has waited for
        self.waited_for: dict[Stream, int] = {}  # number of its operation

    def launch(self) -> int:
        for stream, number, line in self.freed:
            if not self.is_after(stream, number):
                report_race(f"{line}: no record_stream")
        self.freed.clear()
        self.launched += 1
        return self.launched

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for stream, number in event.clock.items():  # also what that stream has waited for
            self.waited_for[stream] = max(self.waited_for.get(stream, 0), number)

    def is_after(self, other: Stream, number: int) -> bool:
        """Return whether operations from now on start after that one of the other stream."""
        done = max(other.finished, self.waited_for.get(other, 0))
        return other is self or number <= done


streams = [Stream()]  # the default one, and the entered ones


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Context in which ``stream`` is the current one."""
    streams.append(stream)
    try:
        yield
    finally:
        streams.pop()


class Memory:
    """Memory of a tensor and its views, in the pool of the stream on which it was allocated.

    When it is freed, the next operation of that stream may use it again. By then, that stream must
    have waited for the streams that used it, or ``record_stream`` must have named them.
    """

    def __init__(self) -> None:
        self.home = streams[-1]
        self.recorded: set[Any] = set()
        self.users: dict[Any, tuple[int, str]] = {}  # other streams: last operation and its line
        self.written()

    def written(self) -> None:
        self.stream = streams[-1]  # the one that wrote it last, and the number of its operation
        self.number = self.stream.launch()

    def __del__(self) -> None:
        unrecorded = (user for user in self.users.items() if user[0] not in self.recorded)
        self.home.freed += [(stream, *use) for stream, use in unrecorded]


_memories: Any = weakref.WeakValueDictionary()  # by address of the storage


def memory_of(values: Any) -> Memory:
    """Return the memory of a tensor, which its views share."""
    storage = values.untyped_storage()._cdata
    return _memories.get(storage) or _memories.setdefault(storage, Memory())  # type: ignore[no-any-return]


def check_streams(func: Any, tensors: list[Any]) -> None:
    """Report tensors with ``memory`` of a stream that the current one has not waited for."""
    if is_view(func):
        return
    now = streams[-1]
    number = now.launch()
    for x in tensors:
        memory = getattr(x, "memory", None)
        if memory is None:
            continue
        if not now.is_after(memory.stream, memory.number):
            report_race(f"{place()}: {func}: no wait_event")
        if memory.home is not now:
            memory.users[now] = number, f"{place()}: {func}"


@cache
def is_view(func: Any) -> bool:
    """Return whether the result of the operation is another view of the same memory."""
    schema = getattr(func, "_schema", None)  # a collective has none
    return schema is not None and any(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )


def report_race(race: str) -> None:
    for context in entered:
        context.races.append(race)


def report_wait(func: Any) -> None:
    """Report that the host waits for everything that the current stream has launched."""
    now = streams[-1]
    now.finished = now.launched
    for context in entered:
        context.waits.append(f"{place()}: {func}")


def place() -> str:
    """Return ``file:line in function: source`` of the innermost frame in this repository."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(path, line).strip()
    return f"{path}:{line} in {frame.f_code.co_name}: {source}"


@cache
def _is_ours(path: str) -> bool:
    is_here = path.startswith(_REPOSITORY) and "/.venv/" not in path
    return is_here and Path(path).name not in _HELPERS  # no one is to blame for a line of these
