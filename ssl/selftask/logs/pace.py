"""Columns of a row in addition to the loss: step time, memory, settings of parameter groups.

``TimeCounter`` measures the run time of any function or block.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor

from selftask.distributed.accelerator import memory_bytes, reset_memory_peaks, wait_for
from selftask.distributed.collectives import all_gather_cat, world_size

_COLUMNS = {
    "allocated_peak": "device_memory_mb",
    "reserved_peak": "device_reserved_mb",
    "allocated": "device_memory_now_mb",
    "reserved": "device_reserved_now_mb",
}


class Pace:
    """Step times since the last row and since the start.

    The host runs ahead of a GPU, so the times of single steps, and their median, are the times to
    queue a step. Writing a row waits for the device, so the mean is exact.
    """

    def __init__(self) -> None:
        self.begun = self.since = time.perf_counter()
        self.waited_s = 0.0
        self.ends: list[float] = []
        self.steps = 0  # number of steps in the rows so far

    def step_ends(self) -> None:
        """Record the end of a step."""
        self.ends.append(time.perf_counter())

    def take(self, data_wait_s: float) -> dict[str, float]:
        """Return ``data_wait``, ``step_s`` and ``step_s_median`` of this rank since the last call.

        These are the share of time spent waiting for data (0 to 1), and the mean and median time of
        a step in seconds. At least one step must have ended since the last call.

        Args:
            data_wait_s: Time spent waiting for data since the start, in seconds.
        """
        now = time.perf_counter()
        seconds = max(now - self.since, 1e-9)
        starts = [self.since, *self.ends[:-1]]
        times = [end - start for start, end in zip(starts, self.ends, strict=True)]
        measured = {
            "data_wait": min((data_wait_s - self.waited_s) / seconds, 1.0),
            "step_s": seconds / len(times),
            "step_s_median": statistics.median(times),
        }
        self.steps += len(times)
        self.since, self.waited_s = now, data_wait_s
        self.ends.clear()
        return measured

    @property
    def mean_s(self) -> float:
        """Mean seconds per step up to the last ``take``, including evaluations and checkpoints."""
        return (self.since - self.begun) / max(self.steps, 1)


class TimeCounter(ContextDecorator):
    """Timer for the mean run time of a function (as a decorator) or a block (as a context).

    Args:
        skip: Number of first calls to leave out, since kernels are chosen or compiled in them.
        device: Device to wait for before and after each call. None measures the host alone.

    Attributes:
        count: Number of measured calls.
        total_s: Their run time in seconds.
    """

    def __init__(self, *, skip: int = 1, device: torch.device | None = None) -> None:
        self.skip, self.device = skip, device
        self.count, self.total_s = 0, 0.0
        self._begun: list[float] = []  # of calls in progress, which may be nested

    @property
    def mean_s(self) -> float:
        """Mean run time of a call in seconds; nan before the first measured call."""
        return self.total_s / self.count if self.count else float("nan")

    def __enter__(self) -> TimeCounter:
        self._begun.append(self._now())
        return self

    def __exit__(self, *_: Any) -> None:
        seconds = self._now() - self._begun.pop()
        if self.skip:
            self.skip -= 1
            return
        self.count, self.total_s = self.count + 1, self.total_s + seconds

    def _now(self) -> float:
        if self.device is not None:
            wait_for(self.device)
        return time.perf_counter()


def take_memory_mb(device: torch.device) -> dict[str, float]:
    """Return memory columns of ``metrics.jsonl`` in MiB, and reset the device's peaks.

    ``memory_mb`` is the peak of this process since its start. The columns of the device are its
    peaks since the last call and the present values, as far as torch counts them for its type.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    counted = memory_bytes(device)
    reset_memory_peaks(device)
    return {
        "memory_mb": peak / (2**20 if sys.platform == "darwin" else 2**10),
        **{_COLUMNS[name]: size / 2**20 for name, size in counted.items()},
    }


def over_ranks(
    means: Mapping[str, Tensor], maxima: Mapping[str, float], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Reduce values over ranks in one collective, which every rank must call with the same names.

    Args:
        means: Tensors of one element by name, to be averaged.
        maxima: Numbers by name, whose maximum is taken.
        device: Device of the collective.

    Returns:
        The means and the maxima, by name.
    """
    terms = [torch.as_tensor(value, device=device).detach().reshape(1) for value in means.values()]
    if world_size() == 1:
        values = map(float, torch.cat(terms).tolist() if terms else ())
        return dict(zip(means, values, strict=True)), dict(maxima)
    largest = torch.tensor(list(maxima.values()), device=device)
    row = torch.cat([*terms, largest])
    # Each column has the values of all ranks.
    columns = list(zip(*all_gather_cat(row.unsqueeze(0)).tolist(), strict=True))
    mean, top = columns[: len(terms)], columns[len(terms) :]
    return (
        dict(zip(means, map(statistics.fmean, mean), strict=True)),
        dict(zip(maxima, map(max, top), strict=True)),
    )


def settings_of_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return ``weight_decay`` unless it is 0, and ``lr/NAME`` of all groups if rates differ.

    Args:
        groups: Parameter groups of an optimizer; one without ``name`` is named by its index.

    Returns:
        The largest weight decay of all groups, and learning rates, by column.
    """
    row: dict[str, float] = {}
    decay = max(float(group.get("weight_decay", 0.0)) for group in groups)
    if decay:
        row["weight_decay"] = decay
    rates = {str(group.get("name", number)): group["lr"] for number, group in enumerate(groups)}
    if len(set(rates.values())) > 1:
        row |= {f"lr/{name}": rate for name, rate in rates.items()}
    return row
