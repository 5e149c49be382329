"""The report of a run without memory, against a real forward pass and a step by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny
from selftask.api.trainer import Trainer
from selftask.hooks.base import function_hook
from selftask.task import Task, memory_report


@pytest.mark.parametrize("method", ["simclr", "byol", "dino"])
def test_activations_as_autograd_keeps_them(method: str, tmp_path: Path) -> None:
    task = tiny.task(method, tmp_path)
    kept: dict[int, Tensor] = {}
    counts: list[tuple[int, int]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def measure(task: Task) -> None:
        state = (*task.base_model.parameters(), *task.base_model.buffers())
        own = {tensor.untyped_storage().data_ptr() for tensor in state}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = task.base_model(task.last_batch.input)
        real = sum(
            tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own
        )
        counts.append((real // tiny.BATCH_SIZE, memory_report._bytes_of_a_sample(task)[""]))
        del output

    task.add_hook(function_hook(on_end=measure))
    Trainer().train(task)
    ((real, counted),) = counts
    assert counted == pytest.approx(real, rel=0.05)


def test_the_nearest_batch_size() -> None:
    assert memory_report.nearest_size(100, world=1) == 96
    assert memory_report.nearest_size(100, world=4) == 384
    assert memory_report.nearest_size(5, world=2) == 10
    assert memory_report.nearest_size(0, world=2) == 0


def test_a_run_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error on the CPU; the budget is that of ten samples."""
    sizes: list[int] = []
    counts: dict[str, int] = {}

    def budget(task: Task, fixed: int) -> int:
        weights = [*task.base_model.parameters(), *task.loss.parameters()]
        trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        assert fixed == 4 * (sum(weight.numel() for weight in weights) + trained) + sizes[0]
        counts.update(memory_report._bytes_of_a_sample(task))
        return int(10.5 / memory_report.USABLE * counts[""])

    def allocate(task: Task) -> None:
        if task.steps_done == 1:
            state = task.optimizer.optimizer.state.values()
            sizes.append(sum(4 * value.numel() for kept in state for value in kept.values()))
            torch.empty(1 << 60)

    monkeypatch.setattr(memory_report, "budget_bytes", budget)
    task = tiny.task("simclr", tmp_path)
    task.add_hook(function_hook(on_forward=allocate))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        Trainer().train(task)
    error = json.loads((tmp_path / "run" / "status.json").read_text())["error"]
    first, *lines = error.splitlines()
    assert first.startswith("the machine's memory is full")
    (message,) = [line for line in lines if line.startswith("memory of a rank: ")]
    assert message.endswith("with train.batch_size=16; the nearest batch size that fits is about 8")
    layers = [line for line in lines if re.match(r"  \S+: [\d.]+ \S+ a sample", line)]
    leaves = {
        n: c for n, c in counts.items() if n and not any(o.startswith(f"{n}.") for o in counts)
    }
    largest = sorted(leaves, key=lambda name: -leaves[name])[: memory_report.LAYERS]
    assert [line.split(":")[0].strip() for line in layers] == largest
