"""When BatchNorm's statistics become equal on two ranks, under every way of reducing gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from selftask.config.schema import ParallelConfig
from selftask.distributed.collectives import gather_objects, rank, world_size
from selftask.distributed.world import World
from selftask.task import Task

WHEN = ("evaluation", "step", "never")
WAYS = ("manual", "ddp", "fsdp")
CASES = [
    *(("manual", when, "broadcast") for when in WHEN),
    *((way, "step", "broadcast") for way in WAYS[1:]),
    ("manual", "step", "mean"),
]
STAGES = ("step 1", "step 2", "exported", "step 3", "saved", "step 4", "test phase")
SYNCED = ["exported", "saved", "test phase"]  # before an evaluation


def buffers_of_runs(_: int) -> dict[tuple[str, str, str], dict[str, Tensor]]:
    """The running statistics of network and teacher at each stage, on this rank."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(gather_objects(made)[0])
        if not rank():
            tiny.digits_file(folder)
        gather_objects(None)
        return {case: _run(*case, folder) for case in CASES}


def _run(way: str, when: str, buffers: str, folder: Path) -> dict[str, Tensor]:
    words = [f"parallel={way}", f"parallel.sync_buffers={when}", f"parallel.buffers={buffers}"]
    words.append("optimizer.lr=1e-4")  # calm: rounding differs by way, and large steps amplify it
    task = tiny.task("byol", folder, f"{way}_{when}_{buffers}_{rank()}", *words)
    task.world = World(rank(), world_size(), rank(), world_size())
    task.prepare()
    task.on_start()
    task.on_phase_start()
    results = {}
    for stage in STAGES:
        if stage == "exported":
            task.export_backbone()
        elif stage == "saved":
            task.save_checkpoint()
        elif stage == "test phase":
            task._test_is_next = lambda: True  # type: ignore[method-assign]
            task.on_phase_start()
        else:
            task.step()
        statistics = [
            buffer.flatten()
            for network in task.networks
            for name, buffer in network.named_buffers()
            if "running" in name
        ]
        results[stage] = torch.cat(statistics).clone()
    task.checkpoints.wait()
    task.close()
    results["files"] = torch.tensor(len([*(task.out / "checkpoints").glob("*.pt")]))
    return results


@pytest.mark.parametrize("case", CASES[:5], ids="-".join)
def test_when_ranks_are_equal(case: Any, rank_results: list[dict[str, Any]]) -> None:
    """The first rank keeps its own; the second gets them as configured, and never otherwise."""
    first, second = (of_rank["buffers_of_runs"] for of_rank in rank_results)
    expected = {"evaluation": SYNCED, "step": [*STAGES], "never": []}[case[1]]
    equal = [stage for stage in STAGES if torch.equal(first[case][stage], second[case][stage])]
    assert equal == expected
    assert (int(first[case]["files"]), int(second[case]["files"])) == (1, 0), "of the first rank"
    for stage in STAGES:
        own = first["manual", "never", "broadcast"][stage]
        torch.testing.assert_close(first[case][stage], own, rtol=1e-4, atol=1e-5)


def test_the_mean_after_each_step(rank_results: list[dict[str, Any]]) -> None:
    first, second = (of_rank["buffers_of_runs"] for of_rank in rank_results)
    own, mean = ("manual", "never", "broadcast"), ("manual", "step", "mean")
    expected = (first[own]["step 1"] + second[own]["step 1"]) / 2
    torch.testing.assert_close(first[mean]["step 1"], expected)
    for stage in STAGES:
        assert torch.equal(first[mean][stage], second[mean][stage])


def synced_buffers(rank: int) -> dict[str, list[float]]:
    """A BatchNorm that saw other numbers on each rank, after ``parallel.buffers`` of each kind."""
    results = {}
    kinds: tuple[Any, ...] = ("broadcast", "mean")
    for kind in kinds:
        norm = nn.BatchNorm1d(2).double()
        for step in range(2 + rank):
            norm(torch.arange(8.0, dtype=torch.float64).reshape(4, 2) * (rank + 1) + step)
        parallel = ParallelConfig(buffers=kind)
        task: Any = SimpleNamespace(
            config=SimpleNamespace(parallel=parallel), networks=[norm.eval()]
        )
        own = norm.running_mean.tolist(), norm.running_var.tolist()
        Task.sync_buffers(task)
        seen = float(norm.num_batches_tracked)
        results[kind] = [*norm.running_mean.tolist(), *norm.running_var.tolist(), seen]
        results[f"{kind} own"] = [*own[0], *own[1], 2.0 + rank]
    return results


def test_buffers_are_those_of_the_first_rank_or_the_mean(
    rank_results: list[dict[str, Any]],
) -> None:
    first, second = (of_rank["synced_buffers"] for of_rank in rank_results)
    assert first["mean own"][0] != second["mean own"][0], "the ranks differ before"
    own = [first["mean own"], second["mean own"]]
    mean = [(a + b) / 2 for a, b in zip(*own, strict=True)]
    for result in (first, second):
        assert result["broadcast"] == own[0]
        assert result["mean"][:4] == pytest.approx(mean[:4], rel=1e-12)
        assert result["mean"][4] == own[0][4], "a count is that of the first rank"


ON_RANKS = (buffers_of_runs, synced_buffers)
