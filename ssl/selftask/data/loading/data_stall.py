"""Detect from log rows that training waits for data, and advise what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from selftask.errors import with_noun

TOO_MUCH = 0.2  # share of time spent waiting
LONG_ENOUGH = 50  # steps in a row


class Cores(NamedTuple):
    """Cores of this machine, and the number of the run's processes that share them."""

    number: int
    processes: int

    @property
    def share(self) -> int:
        """Number of whole cores per process, at least 1."""
        return max(1, self.number // self.processes)


@dataclass
class WaitWatch:
    """Detector that reports once if training waits too much for LONG_ENOUGH steps in a row.

    Too much is more than the share TOO_MUCH of the time, in each log row. The first row after a
    start is ignored, since it includes the start of the workers.
    """

    started: bool = False
    steps: int = 0  # in consecutive rows with too much waiting
    waited: float = 0.0  # these steps, weighted by the share of waiting
    reported: bool = False

    def add_row(self, steps: int, data_wait: float) -> float | None:
        """Record a log row; return the mean share of waiting if it should be reported, else None.

        Args:
            steps: Number of steps in the row.
            data_wait: Share of time spent waiting, 0 to 1.
        """
        if not self.started:
            self.started = True
            return None
        if data_wait <= TOO_MUCH:
            self.steps, self.waited = 0, 0.0
            return None
        self.steps += steps
        self.waited += steps * data_wait
        if self.reported or self.steps < LONG_ENOUGH:
            return None
        self.reported = True
        return self.waited / self.steps


def workers_advice(num_workers: int, cores: Cores) -> str | None:
    """Return a message with advice if ``data.num_workers`` does not suit the cores, else None."""
    here = with_noun(cores.number, "core")
    if cores.processes > 1:
        here += f" for {cores.processes} processes"
    if num_workers == 0 and cores.share > 1:
        return f"data.num_workers=0 reads between the steps; try {cores.share} ({here})"
    if num_workers < cores.share:
        return f"data.num_workers={num_workers} leaves cores idle ({here}); try {cores.share}"
    if num_workers > 2 * cores.share:
        return f"data.num_workers={num_workers} is too many for {here}; try {cores.share}"
    return None


def loader_advice(num_workers: int, cores: Cores, recipe: str, *, has_idle_device: bool) -> str:
    """Return advice to the user on making batches faster, for ``wait_advice``.

    Args:
        num_workers: Number of worker processes of each rank.
        cores: Cores of this machine.
        recipe: Recipe of the run, for the command in the advice.
        has_idle_device: Whether there is an accelerator that waits for data and does not make the
            views itself.
    """
    change = workers_advice(num_workers, cores)
    if change is None:
        change = "the cores are all at work: "
        if has_idle_device:
            change += "data.augment_on=device makes the views on the GPU; "
        change += "cheaper or fewer views, or smaller images, would help"
    return f"{change}; `selftask bench data {recipe}` shows where the time goes"


def wait_advice(data_wait: float, advice: str) -> str:
    """Return a log line with the share of time spent waiting (0 to 1) and the advice."""
    return f"training has waited for data {data_wait:.0%} of the time: {advice}"


def advice_at_start(loader_s: float, step_s: float, images: int, advice: str) -> str | None:
    """Return a log line if training will wait at least the share TOO_MUCH of the time, else None.

    Args:
        loader_s: Seconds in which the workers of a rank together make its part of a batch.
        step_s: Seconds that the device takes for a step with one batch.
        images: Number of images of a batch, over all ranks.
        advice: Result of ``loader_advice``.
    """
    if step_s > (1 - TOO_MUCH) * loader_s:
        return None
    return (
        f"the loader makes {images / loader_s:,.0f} images a second, and the device could train on "
        f"{images / step_s:,.0f}: {advice}"
    )
