"""Rows of the log: times and memory over ranks, settings of groups, and their history."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import resource
import statistics
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from imagined_device import NAME, ImaginedDevice, in_process
from ranks import run_ranks
from selftask.batch import Batch
from selftask.distributed.collectives import all_reduce_mean
from selftask.hooks import metrics
from selftask.hooks.base import function_hook
from selftask.hooks.failures.non_finite import NonFiniteLoss
from selftask.hooks.metrics import Metrics
from selftask.logs import pace, read_json, read_metrics, write_json
from selftask.logs import rows as log_rows
from selftask.logs.history import LENGTH, History
from selftask.logs.pace import Pace, settings_of_groups, take_memory_mb
from selftask.logs.rows import append_row, format_row, parse_lines
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop


def test_pace_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a second and one with an evaluation of ten seconds before it."""
    now = [100.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    measured = Pace()
    for seconds in (1.0, 11.0, 1.0):
        now[0] += seconds
        measured.step_ends()
    row = measured.take(data_wait_s=2.6)
    assert row == pytest.approx({"data_wait": 0.2, "step_s": 13 / 3, "step_s_median": 1.0})
    assert measured.mean_s == pytest.approx(13 / 3)
    now[0] += 2.0
    measured.step_ends()
    assert measured.take(2.6)["data_wait"] == 0.0
    assert measured.mean_s == pytest.approx(15 / 4)


def unequal(rank: int) -> dict[str, float]:
    """The row of a loss of two terms, and of a step that waits longer for data on rank 1."""
    nothing = torch.empty(0, dtype=torch.int64)
    batch = Batch(views={}, labels=nothing, index=nothing, key=nothing)
    batch.local_loss = {
        "a": torch.tensor(1.0 + rank, requires_grad=True),
        "b": torch.tensor(4.0, dtype=torch.bfloat16),
    }
    batch.loss = all_reduce_mean(batch.local_loss.detach())
    metrics.take_memory_mb = lambda device: {"memory_mb": 8.0 - rank}  # type: ignore[attr-defined]
    rows: list[dict[str, float]] = []
    task: Any = SimpleNamespace(device=torch.device("cpu"), last_batch=batch, losses=[], train=True)
    task.config = SimpleNamespace(train=SimpleNamespace(log_every=1))
    task.data_module = SimpleNamespace(data_wait_s=100.0 + 300.0 * rank)
    task.length = SimpleNamespace(batch_size=8, total_steps=2)
    task.optimizer, task.optimizers = SimpleNamespace(param_groups=[{"lr": 0.1}]), {}
    task.steps_done, task.pop_scalars, task.write_row = 1, dict, rows.append
    hook = Metrics()
    hook.on_start(task)
    hook.pace.since -= 1000.0
    hook.on_loss_and_meter(task)
    hook.on_step(task)
    (row,) = rows
    return row


def test_over_ranks() -> None:
    """The loss and its terms are means; ``data_wait``, times and memory are the largest."""
    for row in run_ranks(unequal, 2):
        assert (row["a"], row["b"], row["loss"]) == (1.5, 4.0, 5.5)
        assert row["data_wait"] == pytest.approx(0.4, rel=0.05)
        assert row["step_s"] == pytest.approx(1000.0, rel=0.05)
        assert row["memory_mb"] == 8.0


def test_terms_that_are_not_finite_are_named() -> None:
    task: Any = SimpleNamespace(device=torch.device("cpu"), last_batch=SimpleNamespace())
    task.last_batch.terms = {"a": torch.tensor(1.0), "b": torch.tensor(math.inf)}
    task.optimizer, task.optimizers = SimpleNamespace(param_groups=[{"lr": 0.1}]), {}
    hook = Metrics()
    hook.load_state_dict({"window": torch.tensor([2.0, math.inf]), "steps": [6, 7]})
    hook.on_start(task)
    with pytest.raises(NonFiniteLoss, match=r"is inf at step 7 on rank 0; terms: b; lr was 0\.1\."):
        hook.before_save(task)


def test_settings_of_groups() -> None:
    equal = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.1}]
    assert settings_of_groups(equal) == {}
    unequal = [{"lr": 0.1, "weight_decay": 0.05, "name": "head"}, {"lr": 0.2, "weight_decay": 0}]
    assert settings_of_groups(unequal) == {"weight_decay": 0.05, "lr/head": 0.1, "lr/1": 0.2}


def test_the_rows_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="selftask"):
        task = tiny.train("simclr", tmp_path, "run", "train.log_every=4")
    lines = [line for line in caplog.messages if line.startswith("step ")]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    each = tiny.rows(tmp_path / "run")
    tiny.train("simclr", tmp_path, "every", "train.log_every=1")
    losses = [row["loss"] for row in tiny.rows(tmp_path / "every")]
    assert [row["step"] for row in each] == [4, 8, 12, 15]
    for row, first in zip(rows, (0, 4, 8, 12), strict=True):
        window = losses[first : row["step"]]
        assert row["loss"] == pytest.approx(statistics.fmean(window), rel=1e-6)
        assert row["loss_median"] == pytest.approx(statistics.median(window), rel=1e-6)
        assert row["images_per_s"] * row["step_s"] == pytest.approx(tiny.BATCH_SIZE)
        assert row["step_s_median"] > 0
        assert 0 < row["data_wait"] <= 1
    seconds = 0.0  # since the start
    for row, first in zip(rows, (0, 4, 8, 12), strict=True):
        seconds += row["step_s"] * (row["step"] - first)
        left = seconds / row["step"] * (tiny.STEPS - row["step"])
        assert row["eta_s"] == pytest.approx(left, rel=1e-4)
        recent = row["step_s"] * (tiny.STEPS - row["step"])
        assert row["eta_recent_s"] == pytest.approx(recent, rel=1e-6)
    assert rows[-1]["lr"] == pytest.approx(task.optimizer.param_groups[0]["lr"], rel=1e-8)
    for line, row in zip(lines, rows, strict=True):
        first = rf"step {row['step']}  epoch {row['epoch']:.4g}  loss {row['loss']:.4g}"
        times = rf"{row['images_per_s']:,.0f} images/s  data_wait \d+%  eta \d+:\d\d:\d\d"
        assert re.match(rf"{first}  lr {row['lr']:.4g}  {times}", line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert 0 < rows[0]["memory_mb"] <= rows[-1]["memory_mb"] <= peak * (1 + 1e-6)


def rows_with_a_peak(folder: Path) -> list[dict[str, float]]:
    """Train four steps on the device; the second one allocates 3 GiB and frees 2 of them."""
    memory = torch.get_device_module(NAME)

    def allocate(task: Task) -> None:
        if task.steps_done == 1:
            memory.allocate(3 << 30)
            memory.allocate(-2 << 30)

    with ImaginedDevice():
        words = ["train.device=auto", "train.log_every=1", "train.max_steps=4"]
        task = tiny.task("simclr", folder, "run", *words)
        task.add_hook(function_hook(on_backward=allocate))
        train_loop(task)
    return read_metrics(folder / "run" / "metrics.jsonl")


def test_memory_of_a_device(tmp_path: Path) -> None:
    """A peak is in the row of its step, and in no later one; in MiB."""
    rows = in_process(rows_with_a_peak, tmp_path)
    peaks = [(row["device_memory_mb"], row["device_reserved_mb"]) for row in rows]
    assert peaks == [(0, 0), (3072, 6144), (1024, 2048), (1024, 2048)]
    now = [(row["device_memory_now_mb"], row["device_reserved_now_mb"]) for row in rows]
    assert now == [(0, 0), (1024, 2048), (1024, 2048), (1024, 2048)]


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_memory_of_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics that torch counts, by their documented names."""
    sizes = {"allocated_bytes": (1, 3), "reserved_bytes": (2, 5), "active_bytes": (7, 7)}
    counted = {
        f"{kind}.{pool}.{which}": (size << 30) if pool == "all" else 0
        for kind, both in sizes.items()
        for which, size in zip(("current", "peak"), both, strict=True)
        for pool in ("all", "small_pool")
    }
    reset: list[torch.device] = []
    module = getattr(torch, device)
    monkeypatch.setattr(module, "memory_stats", lambda device: counted)
    monkeypatch.setattr(module, "reset_peak_memory_stats", reset.append)
    row = take_memory_mb(torch.device(device))
    assert row.pop("memory_mb") > 0
    assert row == {
        "device_memory_mb": 3072,
        "device_reserved_mb": 5120,
        "device_memory_now_mb": 1024,
        "device_reserved_now_mb": 2048,
    }
    assert reset == [torch.device(device)]


def test_memory_of_devices_that_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_memory_mb(torch.device("cpu")).keys() == {"memory_mb"}
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 1 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 << 30)
    row = take_memory_mb(torch.device("mps"))
    assert (row["device_memory_now_mb"], row["device_reserved_now_mb"]) == (1024, 2048)
    assert "device_memory_mb" not in row


def test_a_line() -> None:
    """Every term of the loss is shown; columns of groups and layers are in the file only."""
    row = {"step": 50, "epoch": 1.25, "loss": 1.23456, "lr": 0.00012345, "images_per_s": 1812.4}
    row |= {"data_wait": 0.034, "loss_median": 1.2, "step_s": 0.1, "eta_s": 4000.4}
    row |= {"memory_mb": 800.0, "device_memory_mb": 1536.0, "weight_decay": 0.05, "lr/1": 0.1}
    row |= {"activations/stem/std": 1.0, "invariance": 0.5, "loss_scale": 1024.0}
    assert format_row(row) == (
        "step 50  epoch 1.25  loss 1.235  lr 0.0001234  1,812 images/s  data_wait 3%  eta 1:06:40  "
        "device_memory 1.5 GiB  invariance 0.5  loss_scale 1024"
    )


def test_history_against_a_list() -> None:
    history, values = History(), [((7 * n) % 31) / 3 for n in range(2 * LENGTH)]
    for step, value in enumerate(values):
        history.add({"step": step, "loss": value, "images_per_s": 1.0, "text": "no number"})
        if step % 4 == 0:
            history.add({"step": step, "images": step})
    assert history.keys() == {"loss", "images_per_s", "images"}
    images = history["images"]  # of steps 396, 392, ...
    assert (history["loss"].count(10), images.count(10)) == (10, 3)
    assert images.mean(images.count(10)) == 392
    loss = history["loss"]
    assert loss.last() == values[-LENGTH:] and loss.latest == values[-1]
    assert loss.mean(10) == pytest.approx(sum(values[-10:]) / 10)
    assert loss.mean() == pytest.approx(sum(values[-LENGTH:]) / LENGTH)
    assert loss.median(9) == sorted(values[-9:])[4]
    assert (loss.min(5), loss.max(5)) == (min(values[-5:]), max(values[-5:]))
    with pytest.raises(KeyError, match=r"no column 'los' in the rows so far; did you mean 'loss'"):
        history["los"]
    copied = History()
    copied.load_state_dict(history.state_dict())
    assert copied.keys() == {"loss", "images"}, "what a clock measured is not part of a state"
    assert copied["loss"].last() == loss.last() and copied["loss"].steps == loss.steps


def train_and_log(folder: Path, out: str, *more: str) -> Task:
    """Log a tensor at every step, and a number at each odd one."""

    def note(task: Task) -> None:
        task.log("steps", torch.tensor(task.steps_done + 1.0))
        if task.steps_done % 2 == 0:
            task.log("odd", task.steps_done + 1)

    task = tiny.task("simclr", folder, out, "train.log_every=3", "train.max_steps=9", *more)
    task.add_hook(function_hook(on_update=note))
    with suppress(Interrupted):
        train_loop(task)
    return task


def test_what_is_logged_is_in_the_next_row_and_in_the_history(tmp_path: Path) -> None:
    """The newest value; those that no row has yet are saved, too."""
    task = train_and_log(tmp_path, "whole")
    rows = tiny.rows(tmp_path / "whole")
    assert [(row["steps"], row["odd"]) for row in rows] == [(3, 3), (6, 5), (9, 9)]
    assert task.history["odd"].last() == [3.0, 5.0, 9.0]
    assert list(task.history["odd"].steps) == [3, 6, 9]
    assert (task.last_row["odd"], task.scalars) == (9.0, {})
    train_and_log(tmp_path, "parts", "train.stop_at=5")
    parts = train_and_log(tmp_path, "parts", "train.stop_at=null")
    assert tiny.rows(tmp_path / "parts") == rows
    assert parts.history["odd"].last() == [3.0, 5.0, 9.0]


def test_history_survives_a_resume(tmp_path: Path) -> None:
    whole = tiny.train("simclr", tmp_path, "whole").history
    tiny.train("simclr", tmp_path, "run", "train.stop_at=7")
    resumed = tiny.train("simclr", tmp_path, "run").history
    assert whole["loss"].last() == resumed["loss"].last() and len(whole["loss"].values) == 15
    losses = [row["loss"] for row in tiny.rows(tmp_path / "run")]
    assert list(resumed["loss"].steps) == list(range(1, 16))
    assert resumed["loss"].latest == pytest.approx(losses[-1], rel=1e-8)
    assert resumed["loss"].median(10) == pytest.approx(statistics.median(losses[-10:]), rel=1e-8)
    assert resumed["loss"].mean(10) == pytest.approx(statistics.fmean(losses[-10:]), rel=1e-8)


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_small_file_is_written_though_no_other_can_be_created(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without a free inode: the state of a run is still written, in place."""
    path, real = tmp_path / "status.json", io.open
    write_json(path, {"state": "running", "steps": "x" * 200})

    def full(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        if "w" in mode and not os.path.exists(file):
            raise OSError(reason, os.strerror(reason), str(file))
        return real(file, mode, *args, **more)

    monkeypatch.setattr(io, "open", full)
    # Python 3.10 keeps the function that io.open was when it imported pathlib
    monkeypatch.setattr(Path, "open", full)
    write_json(path, {"state": "failed"})
    assert read_json(path) == {"state": "failed"}
    with pytest.raises(OSError, match=os.strerror(reason)):  # more than its blocks hold
        write_json(path, {"state": "x" * (path.stat().st_blocks * 512)})
    assert read_json(path) == {"state": "failed"}
    with pytest.raises(OSError, match=os.strerror(reason)):
        write_json(tmp_path / "new.json", {})
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_a_row_after_a_cut_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_row(path, {"event": "start"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"event": "chec')  # the disk was full
    append_row(path, {"event": "resume"})
    append_row(path, {"event": "finish"})
    rows, damaged = parse_lines(path.read_bytes())
    assert [row["event"] for row in rows] == ["start", "resume", "finish"]
    assert damaged == 1


def test_a_file_removed_while_it_is_read_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank removes its early error while rank 0 looks for one."""
    monkeypatch.setattr(log_rows, "exists", lambda path: True)
    assert read_json(tmp_path / "early_rank1.json") == {}
