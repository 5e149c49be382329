"""When training waits for data: noticed from the rows of the log, with advice what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from selftask.config.values.auto_values import MAX_WORKERS
from selftask.errors import plural

TOO_MUCH = 0.2  # share of the time
LONG_ENOUGH = 50  # steps in a row


class Cores(NamedTuple):
    """Of this machine, and how many processes of the run share them."""

    number: int
    processes: int

    @property
    def share(self) -> int:
        """Cores of one process."""
        return max(1, self.number // self.processes)


@dataclass
class WaitWatch:
    """Says once that training waits for data, when it has done so for LONG_ENOUGH steps.

    The first row after a start is passed over: the workers start in it.
    """

    started: bool = False
    steps: int = 0  # in a row, of rows with too much waiting
    waited: float = 0.0  # steps, weighted by the share that was waiting
    told: bool = False

    def saw(self, steps: int, data_wait: float) -> float | None:
        """A row of ``steps`` steps; the share of waiting if this is the moment to tell."""
        if not self.started:
            self.started = True
            return None
        if data_wait <= TOO_MUCH:
            self.steps, self.waited = 0, 0.0
            return None
        self.steps += steps
        self.waited += steps * data_wait
        if self.told or self.steps < LONG_ENOUGH:
            return None
        self.told = True
        return self.waited / self.steps


def workers_advice(num_workers: int, cores: Cores) -> str | None:
    """What is wrong with ``data.num_workers`` on these cores, or None."""
    here = f"{cores.number} {plural('core', cores.number)}"
    if cores.processes > 1:
        here += f" for {cores.processes} processes"
    better = min(cores.share, max(2 * num_workers, MAX_WORKERS))
    if num_workers == 0 and cores.share > 1:
        return f"data.num_workers=0 reads between the steps; try {better} ({here})"
    if num_workers < cores.share:
        return f"data.num_workers={num_workers} leaves cores idle ({here}); try {better}"
    if num_workers > 2 * cores.share:
        return f"data.num_workers={num_workers} is too many for {here}; try {cores.share}"
    return None


def wait_advice(data_wait: float, num_workers: int, cores: Cores, recipe: str) -> str:
    """The line for the log."""
    change = workers_advice(num_workers, cores)
    if change is None:
        change = "the cores are all at work: cheaper or fewer views, or smaller images, would help"
    return (
        f"training has waited for data {data_wait:.0%} of the time: {change}; "
        f"`selftask bench data {recipe}` shows where the time goes"
    )
