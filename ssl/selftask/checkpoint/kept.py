"""Checkpoints kept in addition to the newest ones: the best by a metric, and every n-th.

They are listed in ``checkpoints/kept.json``. A checkpoint is added to the list after it has been
written, and removed after it has left the list, so that a kill leaves no wrong entry. After a
restart from an earlier checkpoint the file may list ones that were moved; ``Kept.read`` drops them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selftask.checkpoint import rotation
from selftask.checkpoint.rotation import checkpoints, step_of
from selftask.errors import UserError
from selftask.files.addresses import is_remote
from selftask.files.received import read_json
from selftask.files.replace import write_durably

FILE = "kept.json"


@dataclass(frozen=True)
class Kept:
    """Steps of checkpoints that rotation must not remove."""

    metric: str | None = None
    mode: str = "max"
    best: tuple[tuple[int, float], ...] = ()  # step and value of the metric, the best first
    every: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Kept:
        """Return the content of ``folder/kept.json``, restricted to existing checkpoints.

        The result is empty if the file is missing or invalid.
        """
        try:
            kept = cls.of(read_json(folder / FILE))
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return cls()
        return kept.only(map(step_of, checkpoints(folder)))

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Kept:
        """Create the object from the result of ``to_dict``."""
        best = tuple((int(step), float(value)) for step, value in content["best"])
        return cls(content["metric"], content["mode"], best, tuple(map(int, content["every"])))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON and for the state of a hook."""
        best = [[step, value] for step, value in self.best]
        return {"metric": self.metric, "mode": self.mode, "best": best, "every": list(self.every)}

    def write(self, folder: Path) -> None:
        """Write ``folder/kept.json``, or remove it if nothing is kept."""
        if self.steps:
            write_durably(folder / FILE, json.dumps(self.to_dict()))
        else:
            (folder / FILE).unlink(missing_ok=True)

    def rotate(self, newest: Path, keep: int) -> None:
        """Write ``kept.json``, then remove old checkpoints that it does not list.

        Args:
            newest: Path of the newest checkpoint.
            keep: Number of newest checkpoints to keep, whether listed or not.
        """
        self.write(newest.parent)
        rotation.rotate(newest, keep, self.steps)

    @property
    def steps(self) -> set[int]:
        return {step for step, _ in self.best} | set(self.every)

    def only(self, steps: Iterable[int]) -> Kept:
        """Return a copy restricted to the given steps."""
        listed = set(steps)
        best = tuple(pair for pair in self.best if pair[0] in listed)
        return replace(self, best=best, every=tuple(step for step in self.every if step in listed))

    def with_value(self, step: int, value: float, count: int) -> Kept:
        """Return a copy with a new value of the metric, reduced to the ``count`` best values.

        A new value of the same step replaces the old one. Equal values are ranked by step, the
        earliest first.

        Args:
            step: Step of the checkpoint.
            value: Value of the metric at this step.
            count: Number of best checkpoints to keep.
        """
        sign = -1 if self.mode == "max" else 1
        others = [pair for pair in self.best if pair[0] != step]
        ranked = sorted([*others, (step, value)], key=lambda pair: (sign * pair[1], pair[0]))
        return replace(self, best=tuple(ranked[:count]))


def named_checkpoint(address: str) -> Path | None:
    """Return the checkpoint of ``RUN@best`` or ``RUN@STEP``; None for other addresses.

    The result is also None if ``address`` itself is an existing path.

    Raises:
        UserError: If the run has no such checkpoint or is at a remote address.
    """
    run, separator, which = address.rpartition("@")
    if not separator or not (which == "best" or which.isdecimal()) or Path(address).exists():
        return None
    if is_remote(run):
        raise UserError(f"{address}: only checkpoints of a local run can be named; copy the run")
    folder = Path(run).expanduser() / "checkpoints"
    by_step = {step_of(path): path for path in checkpoints(folder)}
    if which == "best":
        best = Kept.read(folder).best
        if not best:
            raise UserError(f"{address}: {run} has no best checkpoint; train.keep_best keeps one")
        return by_step[best[0][0]]
    if int(which) not in by_step:
        steps = ", ".join(map(str, sorted(by_step))) or "none"
        raise UserError(f"{address}: {run} has no checkpoint of step {which}; there are: {steps}")
    return by_step[int(which)]
