"""Advice in the first steps on a GPU whose loader is too slow for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import imagined_streams
import tiny
from imagined_device import ImaginedDevice, in_process
from selftask.hooks.watching import loader_check

STEPS = loader_check.LAST + loader_check.QUEUED


OPTIONS = [
    *(f"train.max_steps={STEPS + 2}", "train.epochs=6", "train.log_every=1000"),
    *("data.num_workers=1", "hooks.progress=null"),
]


def lines_on_device(folder: Path, step_ms: float) -> tuple[list[str], list[str], int, int]:
    """Train on the imagined device, whose steps take ``step_ms``, with one worker.

    Returns:
        Warnings; waits of the host in steps that are not logged; the numbers of hooks that are
        called after the first step and after the last one.
    """
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch, ImaginedDevice() as device:
        patch.setattr(imagined_streams.Event, "elapsed_time", lambda *events: step_ms)
        patch.setattr(loader_check, "cores_of_ranks", lambda _: 1)
        patch.setattr(loader_check.log, "warning", lambda text, *words: lines.append(text % words))
        task = tiny.task("supervised", folder, f"{step_ms}", *OPTIONS, "train.device=auto")
        waits, calls = [], []
        for step in task.steps():
            waits += device.waits if 1 < step <= STEPS + 1 else []
            device.waits.clear()
            calls.append(len(task.calls["on_step"]))
    return lines, [wait for wait in waits if "loader_check" in wait], calls[0], calls[-1]


@pytest.mark.slow
def test_a_slow_loader_is_reported_once_in_the_first_steps(tmp_path: Path) -> None:
    lines, waits, first, last = in_process(lines_on_device, tmp_path, 1e-3)
    (line,) = lines
    assert line.startswith(f"step {STEPS}: the loader makes ")
    assert "data.augment_on=device" in line
    assert waits == []
    assert last == first - 1, "nothing is called any more"
    assert in_process(lines_on_device, tmp_path, 1e5)[0] == [], "the device is the slower one"


def test_nothing_is_compared_on_a_cpu(tmp_path: Path) -> None:
    task = tiny.task("supervised", tmp_path, "run", *OPTIONS)
    task.prepare()
    assert "loader_check" not in task.named_hooks
    task.close()
