"""Whole runs under FSDP: evaluated, clipped, exported, and resumed by another number of ranks."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from ranks import run_ranks
from selftask.checkpoint import rotation
from selftask.config.schema import ParallelConfig
from selftask.data.loading.open_data import open_data
from selftask.distributed.collectives import rank, world_size
from selftask.distributed.world import World
from selftask.evaluate.online import evaluate_task
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

LABELS = "eval.evaluations={knn: {k: [3]}}"
OF_A_RANK = ("emb_std", "effective_rank", "mean_cosine")  # of the embeddings on the first rank
CLIPPED = "hooks.clip_gradients={max_norm: 0.5}"
AVERAGED = "hooks.ema={decay: 0.9, buffers: average}"
WAYS: dict[str, dict[str, Any]] = {
    "manual": {"reduce": "manual"},
    "fsdp": {"reduce": "fsdp"},
    "copies": {"reduce": "fsdp", "shard_over": 1, "cpu_offload": True, "prefetch": 2},
}


def words(folder: Path) -> list[str]:
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 430)}"
    return [val, LABELS, CLIPPED, AVERAGED, "train.max_steps=6", "train.checkpoint_every='1 epoch'"]


def train(method: str, folder: Path, out: str, way: str, *more: str) -> Task:
    """Train with everything a run has; on these ranks."""
    torch.set_num_threads(1)
    config = tiny.config(method, folder, out, *words(folder), *more)
    config = replace(config, parallel=ParallelConfig(**WAYS[way], sync_batch_norm="all"))
    task = Task(config, sources=open_data(config.data))
    task.world = World(rank(), world_size(), rank(), world_size())
    task.evaluate = evaluate_task
    try:
        train_loop(task)
    except Interrupted:
        assert config.train.stop_at is not None
    return task


def on_ranks(_: int, folder: Path, runs: list[tuple[str, ...]]) -> list[str]:
    results = []
    for method, out, way, *more in runs:
        try:
            train(method, folder, out, way, *more)
            results.append("done")
        except Exception:  # noqa: BLE001 - told by the parent
            results.append(traceback.format_exc())
    return results


@pytest.mark.slow
def test_runs_of_sharded_networks(tmp_path: Path) -> None:
    tiny.digits_file(tmp_path)
    words(tmp_path)
    runs = [
        (method, f"{method}_{way}", way, *more)
        for method, *more in (("byol",), ("ijepa",), ("swav",))
        for way in ("manual", "fsdp")
    ]
    stopped = [("byol", f"byol_stopped_{n}", "fsdp", "train.stop_at=3") for n in (1, 2)]
    in_shards = ("parallel=fsdp", "train.sharded_checkpoints=true")
    copies = ("byol", "byol_copies", "copies", *in_shards)
    stopped.append((*copies, "train.stop_at=3"))
    halves = ("mae", "ijepa", "dino")
    half = [(name, f"{name}_bf16", "fsdp", "train.precision=bfloat16") for name in halves]
    for results in run_ranks(on_ranks, 2, tmp_path, [*runs, *stopped, *half]):
        assert not [text for text in results if text != "done"], "\n".join(results)
    resumed = run_ranks(on_ranks, 2, tmp_path, [("byol", "byol_stopped_2", "fsdp"), copies])
    assert resumed == [["done", "done"], ["done", "done"]], resumed
    train("byol", tmp_path, "byol_stopped_1", "fsdp")  # alone: resharded to one

    for method in ("byol", "ijepa", "swav"):
        assert_alike(tmp_path / f"{method}_manual", tmp_path / f"{method}_fsdp")
    assert_alike(tmp_path / "byol_fsdp", tmp_path / "byol_stopped_2")
    assert_alike(tmp_path / "byol_fsdp", tmp_path / "byol_copies")
    assert_alike(tmp_path / "byol_fsdp", tmp_path / "byol_stopped_1", without=OF_A_RANK)
    for name in halves:
        losses = [row["loss"] for row in tiny.rows(tmp_path / f"{name}_bf16") if "loss" in row]
        assert 0 < len(losses) == len([loss for loss in losses if loss < 20])


def assert_alike(a: Path, b: Path, without: tuple[str, ...] = ()) -> None:
    """Rows, checkpoints and exports of two runs, to the rounding of single precision."""
    for first, second in zip(tiny.rows(a), tiny.rows(b), strict=True):
        assert first.keys() == second.keys()
        for key, value in first.items():
            if key in without:
                continue
            assert second[key] == pytest.approx(value, rel=2e-3, abs=2e-3), (a, b, key)
    states = [tiny.last_state(out) for out in (a, b)]
    for key in ("model", "method"):
        assert states[0][key].keys() == states[1][key].keys()
        for name, tensor in states[0][key].items():
            torch.testing.assert_close(
                states[1][key][name], tensor, rtol=1e-2, atol=2e-3, msg=f"{b} {name}"
            )
    groups = [state["optimizer"]["optim"]["param_groups"] for state in states]
    assert groups[0] == groups[1]
    exports = [torch.load(out / "export/backbone.pt", weights_only=True) for out in (a, b)]
    assert exports[0].keys() == exports[1].keys()
    place = states[1]["backbone"].partition(".")
    for name, tensor in exports[1].items():
        assert type(tensor) is torch.Tensor
        held = states[1][place[0]][f"{place[2]}.{name}"]
        assert torch.equal(held, tensor), f"{b}: {name} of export and checkpoint"
    assert rotation.checkpoints(b / "checkpoints")
