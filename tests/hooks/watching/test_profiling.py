"""Profiles of chosen steps, snapshots of memory, statistics of activations."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from ranks import run_ranks
from selftask.errors import ConfigError, UserError
from selftask.hooks.base import function_hook
from selftask.hooks.watching.memory_snapshot import MemorySnapshot
from selftask.task import Task
from selftask.task.loop import train_loop


def test_windows_and_what_they_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two windows of two steps after three; between them no profiler is on."""
    on: list[bool] = []
    words = ["hooks.profiler={wait: 3, warmup: 1, active: 2, repeat: 2, top: 3}", "hooks.timing={}"]
    task = tiny.task("simclr", tmp_path, "run", *words)
    see = function_hook(
        on_forward=lambda task: on.append(torch.autograd.profiler._is_profiler_enabled)
    )
    task.add_hook(see)
    with caplog.at_level("INFO", logger="selftask"):
        train_loop(task)
    recorded = [step for step, enabled in enumerate(on, start=1) if enabled]
    assert recorded == [5, 6, 11, 12]
    folder = tmp_path / "run" / "profile"
    names = ["steps_11_to_12_rank0.json.gz", "steps_5_to_6_rank0.json.gz"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        events = json.loads(gzip.decompress((folder / name).read_bytes()))["traceEvents"]
        counts = {
            word: sum(event["name"] == word for event in events)
            for word in ("forward", "aten::convolution")
        }
        assert counts["forward"] == 2, "the sections of hooks.timing, once a step"
        assert counts["aten::convolution"] > 0
    lines = [message for message in caplog.messages if " ms a step (" in message]
    spent = [float(line.partition(" ms a step (")[0].rpartition(" ")[2]) for line in lines]
    assert len(spent) == 2 * 3, "the most expensive operators of each window"
    assert all(part == sorted(part, reverse=True) for part in (spent[:3], spent[3:]))


@pytest.mark.parametrize("every", [True, False])
def test_traces_of_all_ranks_or_of_the_first(every: bool, tmp_path: Path) -> None:
    run_ranks(_two_steps, 2, tmp_path, every)
    names = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert names == [f"steps_1_to_1_rank{rank}.json.gz" for rank in range(1 + every)]


def _two_steps(rank: int, folder: Path, every: bool) -> None:
    options = f"{{wait: 0, warmup: 0, active: 1, all_ranks: {every}}}"
    tiny.train("simclr", folder, "run", f"hooks.profiler={options}", "train.max_steps=2")


def test_a_window_cut_short_is_written(tmp_path: Path) -> None:
    words = ["hooks.profiler={wait: 0, warmup: 0, active: 9}", "train.max_steps=2"]
    tiny.train("simclr", tmp_path, "run", *words)
    events = events_of(tmp_path / "run")
    assert "aten::convolution" in {event["name"] for event in events}
    assert not {"[memory]", "python_function"} & {e.get(k) for e in events for k in ("name", "cat")}


def events_of(out: Path) -> list[dict[str, Any]]:
    """The events of a run's only trace."""
    (path,) = (out / "profile").iterdir()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def test_what_a_trace_holds_on_request(tmp_path: Path) -> None:
    """Shapes of inputs, allocations, and calls of Python functions."""
    options = "{wait: 0, warmup: 0, active: 1, shapes: true, memory: true, stacks: true}"
    tiny.train("simclr", tmp_path, "run", f"hooks.profiler={options}", "train.max_steps=1")
    events = events_of(tmp_path / "run")
    convolution = next(event for event in events if event["name"] == "aten::convolution")
    assert convolution["args"]["Input Dims"][0] == [2 * tiny.BATCH_SIZE, 3, 32, 32]
    assert "[memory]" in {event["name"] for event in events}
    assert "python_function" in {event.get("cat") for event in events}


def test_a_snapshot_of_the_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="records the allocator of CUDA, and this run is on cpu"):
        tiny.train("simclr", tmp_path, "run", "hooks.memory_snapshot={}")


def test_snapshots_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the chosen step, and when memory is full but not after other errors."""
    memory, dumped, recorded = torch.cuda.memory, [], []
    monkeypatch.setattr(memory, "_record_memory_history", lambda **kw: recorded.append(kw))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: dumped.append(Path(path).name))
    task: Any = SimpleNamespace(
        device=torch.device("cuda"), out=tmp_path, train=True, exception=None
    )
    hook = MemorySnapshot(at_step=2, max_entries=7)
    hook.on_start(task)
    assert recorded == [{"max_entries": 7}], "allocations, from the start"
    for step in (1, 2, 3):
        task.steps_done = step
        hook.on_step(task)
    for task.exception in (ValueError(), torch.OutOfMemoryError()):
        hook.on_exception(task)
    assert dumped == ["memory_step_2_rank0.pickle", "memory_full_rank0.pickle"]
    hook.release()
    assert recorded[1:] == [{"enabled": None}], "also after an error"


@pytest.mark.parametrize("write", ["summary", "both"])
def test_summaries_on_a_gpu(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's table as text; alone, no allocation is recorded."""
    memory, calls = torch.cuda.memory, []
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append("record"))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append("dump"))
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda device: f"| {device.type} |")
    task: Any = SimpleNamespace(device=torch.device("cuda"), out=tmp_path, train=True, steps_done=2)
    hook = MemorySnapshot(at_step=2, write=write)
    hook.on_start(task)
    hook.on_step(task)
    hook.release()
    assert (tmp_path / "profile" / "memory_step_2_rank0.txt").read_text() == "| cuda |\n"
    assert calls == (["record", "dump", "record"] if write == "both" else [])


def test_activations_against_the_layers_themselves(tmp_path: Path) -> None:
    """Of a transformer and in logged steps only; the run is bit for bit as without the hook."""
    kept: list[dict[str, Tensor]] = []

    def keep(task: Task) -> None:
        backbone = task.base_model.backbone
        outputs: dict[str, Tensor] = {}
        for name, layer in backbone.named_modules():
            if name and name.count(".") < 2:
                layer.register_forward_hook(
                    lambda layer, args, output, name=name: outputs.update(
                        {name: output.detach().clone()}
                    )
                )
        kept.append(outputs)

    words = ["train.log_every=2", "train.max_steps=4"]
    task = tiny.task("simclr", tmp_path, "run", *words, "hooks.activations={}")
    task.add_hook(function_hook(on_start=keep))
    train_loop(task)
    *_, row = tiny.rows(tmp_path / "run")
    names = {name.split("/")[1] for name in row if name.startswith("activations/")}
    assert names and names <= kept[0].keys()
    for name in names:
        output = kept[0][name].double()
        assert row[f"activations/{name}/mean"] == pytest.approx(float(output.mean()), abs=1e-5)
        assert row[f"activations/{name}/std"] == pytest.approx(float(output.std()), rel=1e-4)
        zeros = float((output == 0).double().mean())
        assert row[f"activations/{name}/zeros"] == pytest.approx(zeros, abs=1e-6)
        vectors = output.flatten(2).mean(2) if output.ndim > 2 else output
        singular = torch.linalg.svdvals(vectors - vectors.mean(0))
        share = singular / singular.sum()
        rank = float(torch.exp(-torch.special.xlogy(share, share).sum()))
        assert row[f"activations/{name}/rank"] == pytest.approx(rank, rel=2e-2)
    tiny.train("simclr", tmp_path, "plain", *words)
    plain = tiny.last_state(
        tmp_path / "plain", without=["config", "metrics_bytes", "history", "hooks"]
    )
    watched = tiny.last_state(
        tmp_path / "run", without=["config", "metrics_bytes", "history", "hooks"]
    )
    assert tiny.differences(plain, watched) == []


def test_activations_of_a_compiled_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sees no layers in a compiled model"):
        tiny.config("simclr", tmp_path, "run", "hooks.activations={}", "train.compile=model")
