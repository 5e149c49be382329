"""Checkpoints written while training goes on: from a copy, one at a time, never lost in silence."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.checkpoint import manifest, rotation, store
from selftask.checkpoint.writer import CheckpointWriter, HostBuffers
from selftask.cli.main import main
from selftask.errors import RunError
from selftask.task import Task, task_state

EVERY = "train.checkpoint_every='2 steps'"


class Gate:
    """Holds every write of a checkpoint file until it is opened; counts those at work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.inside, self.most, self.lock = threading.Event(), 0, 0, threading.Lock()
        write = store.write_checked

        def held(state: dict[str, Any], path: Path) -> dict[str, int]:
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            assert self.open.wait(20)
            seal = write(state, path)
            with self.lock:
                self.inside -= 1
            return seal

        monkeypatch.setattr(store, "write_checked", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()  # a failed test must leave no thread behind


def fail_from(monkeypatch: pytest.MonkeyPatch, step: int, error: Exception) -> None:
    """From the checkpoint of ``step`` on, the disk is full half-way through the file."""
    write = store.write_checked

    def full(state: dict[str, Any], path: Path) -> dict[str, int]:
        if int(path.name.split("_")[1].split(".")[0]) < step:
            return write(state, path)
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(store, "write_checked", full)


def no_room() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def steps(folder: Path) -> list[int]:
    return [int(path.stem.split("_")[1]) for path in rotation.checkpoints(folder)]


def test_the_state_may_change_while_it_is_written(tmp_path: Path, gate: Gate) -> None:
    weight, history = torch.arange(5.0), [1, 2]
    state = {"weight": weight, "history": history, "inner": {"half": weight[:2]}}
    writer = CheckpointWriter(tmp_path, keep=3)
    writer.save(state, 1)
    weight.add_(100)
    history.append(3)
    state["inner"]["half"] = None
    assert rotation.checkpoints(tmp_path) == []
    gate.open.set()
    writer.wait()
    loaded = store.load(tmp_path / "step_000000001.pt")
    assert torch.equal(loaded["weight"], torch.arange(5.0))
    assert torch.equal(loaded["inner"]["half"], torch.arange(2.0))
    assert loaded["history"] == [1, 2]


def test_one_at_a_time_and_the_wait_is_told_once(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(3)
    writer = CheckpointWriter(tmp_path, keep=9)
    begun = time.perf_counter()
    threading.Timer(0.3, gate.open.set).start()
    for step in range(5):
        weight.fill_(step)
        writer.save({"weight": weight}, step)
        if step == 1:  # it had to wait for the gate, since its copy goes where the first one's is
            assert time.perf_counter() - begun > 0.29
    writer.wait()
    assert gate.most == 1
    assert steps(tmp_path) == [4, 3, 2, 1, 0]
    for step in range(5):
        loaded = store.load(tmp_path / f"step_{step:09d}.pt")
        assert loaded["weight"].tolist() == [step] * 3
    messages = [record.message for record in caplog.records if "waited" in record.message]
    assert len(messages) == 1
    assert "train.checkpoint_every is shorter" in messages[0]


def test_the_last_one_is_on_disk_on_return(tmp_path: Path, gate: Gate) -> None:
    writer = CheckpointWriter(tmp_path, keep=9)
    writer.save({"n": 1}, 1)
    threading.Timer(0.2, gate.open.set).start()
    writer.save({"n": 2}, 2, last=True)
    assert steps(tmp_path) == [2, 1]
    assert not list(tmp_path.glob(".*"))
    assert gate.most == 1


def test_buffers_are_kept_and_values_and_layouts_stay() -> None:
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    module = torch.nn.BatchNorm1d(3)
    state = {
        "images": images,
        "again": images,  # tied
        "part": images[:, 1:],
        "transposed": torch.randn(3, 5).t(),
        "repeated": torch.ones(1, 4).expand(3, 4),
        "nothing": torch.empty(0, 2),
        "module": module.state_dict(),
        "flags": [torch.tensor([True, False]), (torch.tensor(2, dtype=torch.float16), 3)],
        "sparse": torch.eye(3).to_sparse(),
        1: torch.ones(2),
        "1": torch.zeros(2),
    }
    buffers = HostBuffers()
    first, waits = buffers.copy(state)
    assert waits == []
    assert tiny.differences(without_sparse(first), without_sparse(state)) == []
    assert torch.equal(first["sparse"].to_dense(), torch.eye(3))
    assert first["images"].stride() == images.stride()
    assert first["images"] is first["again"]
    assert first["images"].data_ptr() != images.data_ptr()
    assert first["part"].untyped_storage().nbytes() == first["part"].numel() * 4
    assert type(first["module"]) is OrderedDict
    assert first["module"]._metadata == module.state_dict()._metadata
    assert type(first["flags"][1]) is tuple

    images.mul_(2)
    state["1"] = torch.zeros(4)
    second, _ = buffers.copy(state)
    assert second["images"].data_ptr() == first["images"].data_ptr()
    assert torch.equal(second["images"], images)
    assert second["1"].shape == (4,)
    assert second[1].data_ptr() == first[1].data_ptr()


def without_sparse(state: dict[Any, Any]) -> dict[Any, Any]:
    return {key: item for key, item in state.items() if key != "sparse"}


def test_a_failed_write_is_raised_once_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CheckpointWriter(tmp_path, keep=3)
    writer.save({"n": 1}, 1)
    writer.wait()
    fail_from(monkeypatch, 2, no_room())
    writer.save({"n": 2}, 2)
    expected = (
        rf"the checkpoint of step 2 could not be written to {tmp_path} "
        r"\(No space left on device\); .* it continues from step_000000001.pt"
    )
    with pytest.raises(RunError, match=expected):
        writer.save({"n": 3}, 3)
    writer.wait()
    assert steps(tmp_path) == [1]
    assert not list(tmp_path.glob(".*")), "half a file is in the way on a full disk"
    assert "No space left" in caplog.text, "told at once, not only where it is raised"

    writer.save({"n": 4}, 4)
    writer.finalize()  # another error counts more
    assert "the newest checkpoint is missing" in caplog.text
    writer.wait()
    with pytest.raises(RunError, match="step 5"):
        writer.save({"n": 5}, 5, last=True)


def test_other_errors_pass_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path, keep=3)
    with pytest.raises(TypeError, match=r"state\.a is a set"):
        writer.save({"a": {1}}, 1)
    fail_from(monkeypatch, 1, RuntimeError("a bug"))
    writer.save({"n": 1}, 1)
    with pytest.raises(RuntimeError, match="a bug"):
        writer.wait()


def test_a_real_write_that_fails_and_one_that_outlives_its_program(tmp_path: Path) -> None:
    """torch answers a failed write with an error of its own; the cause must come through."""
    code = f"""
import resource, signal, time, torch
from pathlib import Path
from selftask.checkpoint import store
from selftask.checkpoint.writer import CheckpointWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
writer = CheckpointWriter(Path({str(tmp_path)!r}), keep=3)
writer.save({{"a": torch.zeros(100_000)}}, 1)
writer.save({{"a": torch.zeros(1_000_000)}}, 2)
try:
    writer.wait()
except Exception as error:
    print(type(error).__name__, error)
write = store.write_checked
store.write_checked = lambda *given: (time.sleep(0.5), write(*given))[1]
writer.save({{"a": torch.ones(200_000)}}, 3)
raise KeyboardInterrupt
"""
    done = tiny.run([sys.executable, "-c", code], tmp_path)
    assert "KeyboardInterrupt" in done.stderr.splitlines()[-1]
    assert done.stdout.startswith("RunError the checkpoint of step 2 could not be written"), done
    assert "(File too large)" in done.stdout
    assert steps(tmp_path) == [3, 1]
    newest = store.load_newest(tmp_path)
    assert newest is not None
    assert torch.equal(newest[0]["a"], torch.ones(200_000))
    assert not list(tmp_path.glob(".*"))


def test_rows_are_on_disk_before_the_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "metrics.jsonl"
    rows.write_text("{}\n")
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace
    writing = rf"\.{re.escape(socket.gethostname())}\.\d+-\d+"  # in the names of temporary files

    def seen_fsync(handle: int) -> None:
        seen.append(re.sub(writing, "", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def seen_replace(old: Path, new: Path) -> None:
        seen.append(f"named {new.name}")
        replace(old, new)

    monkeypatch.setattr(manifest.os, "fsync", seen_fsync)
    monkeypatch.setattr(manifest.os, "replace", seen_replace)
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=1, durable=[rows])
    writer.save({"metrics_bytes": 3}, 1)
    writer.wait()
    name = "step_000000001"
    assert seen[:3] == [f".{name}.pt.tmp", "metrics.jsonl", f"named {name}.pt"]
    assert seen[3:] == [f".{name}.json.tmp", f"named {name}.json", "checkpoints"]


# -- in a run --------------------------------------------------------------------------------------


def train(folder: Path, *more: str) -> int:
    """``selftask train`` in this process."""
    return main(["train", "simclr/digits", *tiny.overrides("simclr", folder, "run", *more)])


def test_a_full_disk_ends_the_run_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_from(patch, 4, no_room())
        assert train(tmp_path, EVERY) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("RUN FAILED at step 6 on rank 0: the checkpoint of step 4 could not be")
    assert "No space left on device" in last
    assert tiny.status(tmp_path / "run")["state"] == "failed"
    assert steps(tmp_path / "run/checkpoints") == [2]
    assert train(tmp_path, EVERY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("resumed from" in line and "step 2" in line for line in lines)
    assert lines[-1].startswith("RUN finished: 15 steps")


def test_no_run_finishes_without_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_from(monkeypatch, 3, no_room())
    assert train(tmp_path, "train.max_steps=3") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("RUN FAILED at step 3 on rank 0: the checkpoint of step 3 could not be")
    assert tiny.status(tmp_path / "run")["state"] == "failed"


def test_another_error_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trouble(task: Task) -> None:
        if task.steps_done == 3:
            raise ZeroDivisionError("trouble on purpose")

    monkeypatch.setattr("selftask.methods.simclr.SimCLR.on_step", lambda self, task: trouble(task))
    fail_from(monkeypatch, 2, no_room())
    assert train(tmp_path, EVERY) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("ZeroDivisionError: trouble on purpose")
    assert "the newest checkpoint is missing, too" in out
    assert "No space left on device" in out


@pytest.mark.parametrize("stop", [3, 4])
def test_a_stop_waits_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """At step 3 another save follows the one under way; at step 4 it is the one under way."""
    write, order = manifest.write_checked, []

    def slow(state: dict[str, Any], path: Path) -> dict[str, int]:
        time.sleep(0.3)
        return write(state, path)

    def left() -> None:
        order.append(steps(tmp_path / "run/checkpoints"))

    monkeypatch.setattr(store, "write_checked", slow)
    task = tiny.task("simclr", tmp_path, "run", EVERY, f"train.stop_at={stop}")
    task.prepare()
    monkeypatch.setattr(task_state, "barrier", left)  # past it, other ranks may leave
    task.on_start()
    task.on_phase_start()
    while task.interrupted_by is None:
        task.step()
    task.save_checkpoint()
    assert order == [[3, 2] if stop == 3 else [4, 2]]
    task.close()


def test_sync_and_async_files_hold_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = (EVERY, "train.max_steps=6")
    tiny.train("moco", tmp_path, "async", *short)

    def start(self: threading.Thread) -> None:
        assert self.name != "checkpoint", "async_checkpoints=false needs no thread"
        begin(self)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    more = (*short, "train.async_checkpoints=false")
    tiny.train("moco", tmp_path, "sync", *more)
    files = rotation.checkpoints(tmp_path / "async/checkpoints")
    assert len(files) == 3
    sync = tmp_path / "sync/checkpoints"
    for file in files:
        one, other = (store.load(path) for path in (file, sync / file.name))
        for state in (one, other):
            del state["config"], state["metrics_bytes"]  # rows hold times: a digit more or less
        assert tiny.differences(one, other) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_goes_on_at_once(tmp_path: Path) -> None:
    """Copies are queued between the kernels before and after; pinned, so that nothing waits."""
    weight = torch.zeros(4_000_000, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    writer = CheckpointWriter(tmp_path, keep=3)
    for step in (1, 2):
        for _ in range(50):
            busy = busy @ busy / 64
        weight.fill_(step)
        torch.cuda.current_stream().record_event(done := torch.cuda.Event())
        writer.save({"weight": weight, "busy": busy}, step)
        if step == 2:  # the first save allocates
            assert not done.query(), "save waited for the GPU"
        weight.fill_(-1)
    writer.wait()
    for step in (1, 2):
        loaded = torch.load(tmp_path / f"step_{step:09d}.pt", weights_only=True)
        assert loaded["weight"].device.type == "cpu"
        assert (loaded["weight"] == step).all()
    buffers = HostBuffers()
    copied, waits = buffers.copy({"weight": weight})
    assert copied["weight"].is_pinned()
    assert len(waits) == 1
