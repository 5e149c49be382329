"""Where the time of a step goes: named sections, off unless asked for."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


class NoTimer:
    """The timer of a run that does not ask where its time goes: costs a call."""

    def __call__(self, section: str) -> AbstractContextManager[None]:
        return _NOTHING


class Timer:
    """Adds up host seconds per section and names it in torch's profiler.

    On a GPU the host only queues work, so these are launch times; the profiler shows the rest.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def __call__(self, section: str) -> AbstractContextManager[None]:
        return _Section(self, section)

    def table(self) -> str:
        """One line per section: total, calls, mean in milliseconds; longest first."""
        rows = sorted(self.seconds, key=lambda name: -self.seconds[name])
        lines = [f"{'section':<18}{'total s':>10}{'calls':>9}{'mean ms':>10}"]
        for name in rows:
            total, calls = self.seconds[name], self.calls[name]
            lines.append(f"{name:<18}{total:>10.2f}{calls:>9}{1e3 * total / calls:>10.3f}")
        return "\n".join(lines)


class _Section(AbstractContextManager[None]):
    def __init__(self, timer: Timer, name: str) -> None:
        self.timer, self.name = timer, name
        self.record = torch.profiler.record_function(name)

    def __enter__(self) -> None:
        self.record.__enter__()
        self.start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self.start
        self.timer.seconds[self.name] = self.timer.seconds.get(self.name, 0.0) + seconds
        self.timer.calls[self.name] = self.timer.calls.get(self.name, 0) + 1
        self.record.__exit__(kind, error, trace)
