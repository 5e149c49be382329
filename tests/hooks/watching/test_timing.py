"""The timing hook: each section gets the time that passed in it, whatever the train step."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.errors import UserError
from selftask.hooks.watching import timing
from selftask.logs import read_metrics
from selftask.task import Task

SECONDS = {"read": 11, "forward": 3, "hooks": 4, "loss": 5, "backward": 2, "reduce": 1, "update": 7}


class Slow:
    """A clock, and the parts of a task that move it by ``SECONDS``."""

    def __init__(self, task: Task) -> None:
        self.now = 0.0
        batches, reduce = task._read_batches, task.reduction.reduce
        task._read_batches = lambda: self.batches(batches())  # type: ignore[method-assign]
        task.model.register_forward_pre_hook(self.takes("forward"))
        task.calls["on_forward"] = [*task.calls.get("on_forward", []), self.takes("hooks")]
        task.loss.register_forward_pre_hook(self.takes("loss"))
        next(task.model.parameters()).register_hook(self.takes("backward"))
        task.reduction.reduce = lambda: (self.takes("reduce")(), reduce())[1]  # type: ignore
        task.optimizer.optimizer.register_step_post_hook(self.takes("update"))

    def takes(self, section: str) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            self.now += SECONDS[section]

        return wait

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.takes("read")()
            yield batch


class Event:
    """An event of a device, at a time of ``Slow``."""

    def __init__(self, at_s: float) -> None:
        self.at_s, self.waited_for = at_s, False

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, end: Event) -> float:
        assert end.waited_for
        return 1e3 * (end.at_s - self.at_s)


@pytest.mark.parametrize(("accumulate", "clock"), [(1, "device"), (2, "host")])
def test_each_section_gets_its_time(
    tmp_path: Path,
    accumulate: int,
    clock: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the host's clock on a CPU, by events of an accelerator; in one row, and in one a step."""
    step = "accumulate" if accumulate > 1 else "standard"
    more = ("hooks.timing.skip=0", f"train.step={step}", f"train.accumulate={accumulate}")
    every = f"train.log_every={2 // accumulate}"
    task = tiny.task("simclr", tmp_path, "run", *more, "train.max_steps=2", every)
    task.prepare()
    slow = Slow(task)
    if clock == "device":
        monkeypatch.setattr(timing, "is_accelerator", lambda device: True)
        monkeypatch.setattr(timing, "record_event", lambda device, timing: Event(slow.now))
    task.on_start()
    if clock == "host":
        task.named_hooks["timing"].clock = lambda: slow.now
    with caplog.at_level("INFO", "selftask"):
        task.on_phase_start()
        task.step()
        task.step()
        slow.now += 1000  # an evaluation, say: no part of a step
        task.on_phase_end()
        task.on_end()
    task.close()

    often = {"read", "forward", "hooks", "loss", "backward"}
    expected = {f"ms_{s}": 1e3 * n * (accumulate if s in often else 1) for s, n in SECONDS.items()}
    rows = read_metrics(task.out / "metrics.jsonl")
    assert len(rows) == accumulate
    for row in rows:
        assert {name: row[name] for name in row if name.startswith("ms_")} == expected
    message = next(line for line in caplog.messages if line.startswith("milliseconds a step: "))
    parts = re.findall(r"(\w+) ([\d.]+) \((\d+)%\)", message)
    assert {f"ms_{section}": float(ms) for section, ms, _ in parts} == expected
    assert abs(sum(int(share) for *_, share in parts) - 100) <= len(parts)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_summary_leaves_out_the_first_steps(
    tmp_path: Path, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    more = ("hooks.timing={}", "train.max_steps=5", f"train.log_every={every}")
    task = tiny.task("simclr", tmp_path, "run", *more)
    task.prepare()
    slow, extra = Slow(task), [0, 0, 20, 50, 100]
    taken = [SECONDS["hooks"] + seconds for seconds in reversed(extra)]

    def dawdle(task: Task) -> None:
        slow.now += extra.pop()

    task.calls["on_forward"].append(dawdle)
    task.on_start()
    task.named_hooks["timing"].clock = lambda: slow.now
    task.on_phase_start()
    for _ in taken:
        task.step()
    with caplog.at_level("INFO", "selftask"):
        task.on_end()
    task.close()
    rows = read_metrics(task.out / "metrics.jsonl")
    means = [sum(taken[i : i + every]) / every for i in range(0, 5 - every + 1, every)]
    assert [row["ms_hooks"] for row in rows][: len(means)] == [1e3 * mean for mean in means]
    (line,) = (text for text in caplog.messages if text.startswith("milliseconds a step: "))
    assert f"hooks {1e3 * SECONDS['hooks']:.1f} " in line


def test_test_phases_are_left_out(tmp_path: Path) -> None:
    more = ("hooks.timing={}", "meters.accuracy={name: accuracy, topk: [1]}", "train.log_every=7")
    task = tiny.task("supervised", tmp_path, "run", *more, f"data.val={tiny.digits_file(tmp_path)}")
    task.prepare()
    slow = Slow(task)
    task.on_start()
    task.named_hooks["timing"].clock = lambda: slow.now
    for _ in range(3):  # five steps, a test phase, and two steps that end in a row
        task.on_phase_start()
        for _ in range(5):
            task.step()
        task.on_phase_end()
    task.close()
    row = next(row for row in read_metrics(task.out / "metrics.jsonl") if "loss" in row)
    assert {s: row[f"ms_{s}"] for s in SECONDS} == {s: 1e3 * n for s, n in SECONDS.items()}


def test_sections_are_ranges_of_the_profiler(tmp_path: Path) -> None:
    task = tiny.task("byol", tmp_path, "run", "hooks.timing={}")
    task.prepare()
    task.on_start()
    task.on_phase_start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        began = time.perf_counter()
        task.step()
        taken = 1e3 * (time.perf_counter() - began)
    task.on_exception()
    task.close()
    (row,) = read_metrics(task.out / "metrics.jsonl")
    assert 0.3 * taken < sum(row[f"ms_{section}"] for section in SECONDS) < taken, "real time"
    seen = {event.key for event in profile.key_averages()}
    assert seen >= set(SECONDS)


def test_sections_are_nvtx_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, all closed; on a CPU they are refused."""
    ranges: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: ranges.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    task = tiny.task("byol", tmp_path, "run", "hooks.timing={nvtx: true}")
    task.prepare()
    with pytest.raises(UserError, match="NVTX ranges are for CUDA, this run is on cpu"):
        task.on_start()
    hook = task.named_hooks["timing"]
    hook.nvtx = False
    task.on_start()
    hook.nvtx = True
    task.on_phase_start()
    task.step()
    task.on_exception()
    task.close()
    assert set(ranges[::2]) == set(SECONDS) and set(ranges[1::2]) == {"end"}
    assert ranges[-1] == "end"
