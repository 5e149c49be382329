"""Runs in which a step gives NaN."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from selftask.hooks.failures.non_finite import NonFiniteLoss
from selftask.task.loop import train_loop


def inject(kind: str, at: int, rank: int = 0) -> str:
    return f"hooks.fault_injection={{kind: {kind}, at: {at}, rank: {rank}}}"


def failure(folder: Path, *more: str, method: str = "simclr") -> str:
    """The message of a run that fails because of NaN."""
    task = tiny.task(method, folder, "run", *more)
    with pytest.raises(NonFiniteLoss) as error:
        train_loop(task)
    assert isinstance(error.value, FloatingPointError), "as a script would catch it"
    return str(error.value)
