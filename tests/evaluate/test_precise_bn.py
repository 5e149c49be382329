"""``hooks.precise_bn`` beside population statistics computed in double precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from ranks import run_ranks
from selftask.data.loading.open_data import open_data
from selftask.distributed.collectives import rank, world_size
from selftask.distributed.world import World
from selftask.evaluate import online
from selftask.hooks.base import function_hook
from selftask.hooks.precise_bn import PreciseBatchNorm
from selftask.models.build import build_backbone
from selftask.random.permutation import epoch_order
from selftask.task import Task
from selftask.task.loop import train_loop

HOOK = "hooks.precise_bn={batches: 4, batch_size: 16}"


def exported(task_out: Path) -> dict[str, Tensor]:
    return torch.load(task_out / "export/backbone.pt")


def expected(folder: Path, out: str) -> dict[str, Tensor]:
    """Mean and biased variance of what enters each BatchNorm over four batches of 16 images."""
    task = tiny.task("simclr", folder, out)
    task.prepare()
    network = build_backbone(task.config.backbone, 3).double()
    network.load_state_dict({k: v.double() for k, v in exported(folder / out).items()})
    order = epoch_order(task.config.train.seed, 0, 80).at(np.arange(64))
    images: Tensor = torch.cat([s.input for s in task.data_module.labeled_samples()])
    entered: dict[str, list[Tensor]] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            entered[name] = []
            module.register_forward_pre_hook(lambda _, x, name=name: entered[name].append(x[0]))
    network.train()
    with torch.no_grad():
        for batch in order.reshape(4, 16):
            network(images[batch].double())
    task.close()
    whole = {name: torch.cat(parts) for name, parts in entered.items()}
    return {
        **{f"{name}.running_mean": x.mean((0, 2, 3)) for name, x in whole.items()},
        **{f"{name}.running_var": x.var((0, 2, 3), correction=0) for name, x in whole.items()},
    }


def test_exports_population_statistics_and_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation after the last step is of the exported backbone."""
    assert PreciseBatchNorm().batches == 200, "as in detectron2"
    evaluated: list[dict[str, Tensor]] = []

    def keep(backbone: nn.Module, *_: object) -> dict[str, float]:
        evaluated.append(dict(backbone.state_dict()))
        return {}

    monkeypatch.setattr(online, "evaluate_features", keep)
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 430)}"
    words = ("train.max_steps=3", "eval.evaluations={knn: {}}", val)
    for out, hook in (("precise", [HOOK]), ("plain", [])):
        task = tiny.task("simclr", tmp_path, out, *words, *hook)
        task.add_hook(function_hook(on_end=lambda task: online.evaluate_task(task) and None))
        train_loop(task)
        assert tiny.differences(evaluated[-1], exported(tmp_path / out)) == []
    ours, plain = exported(tmp_path / "precise"), exported(tmp_path / "plain")
    wanted = expected(tmp_path, "precise")
    assert len(wanted) > 4
    for name in ours:
        if name in wanted:
            torch.testing.assert_close(ours[name].double(), wanted[name], rtol=1e-4, atol=1e-6)
            assert not torch.allclose(ours[name], plain[name], rtol=1e-2)
        elif "num_batches_tracked" not in name:
            assert torch.equal(ours[name], plain[name])
    without = ("config", "metrics_bytes", "hooks")
    states = [tiny.last_state(tmp_path / out, without) for out in ("precise", "plain")]
    assert tiny.differences(*states) == []


def test_changes_of_other_hooks_are_kept_and_made_once(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path, "run", HOOK, "train.on_nan=rollback")
    changes: list[int] = []

    def add(task: Task) -> None:
        task.before_export.append(lambda backbone: changes.append(1) or backbone)

    def break_once(task: Task) -> None:
        if task.steps_done == 1 and not task.rollbacks:
            task.last_batch.loss.fill_(float("nan"))

    task.add_hook(function_hook(priority=5, on_start=add, on_loss_and_meter=break_once))
    train_loop(task)
    assert task.rollbacks == 1
    changes.clear()
    task.export_backbone()
    assert changes == [1]
    assert len(task.before_export) == 2


def train_on_ranks(_: int, folder: Path, out: str) -> None:
    still = ("train.max_steps=1", "optimizer.lr=1e-12", "parallel.sync_batch_norm=all")
    task = tiny.task("simclr", folder, out, *still, HOOK)
    task.world = World(rank(), world_size(), rank(), world_size())
    train_loop(task)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    tiny.digits_file(tmp_path)
    for number in (1, 2):
        run_ranks(train_on_ranks, number, tmp_path, f"on_{number}")
    one, two = exported(tmp_path / "on_1"), exported(tmp_path / "on_2")
    assert any("running_var" in name for name in one)
    for name in one:
        if "num_batches_tracked" not in name:
            torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)


def test_of_a_module_that_the_config_does_not_describe(tmp_path: Path) -> None:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    config = tiny.config("simclr", tmp_path, "run", "train.max_steps=1", HOOK)
    task = Task(config, sources=open_data(config.data), backbone=nn.Sequential(*layers))
    train_loop(task)
    images = torch.cat([s.input for s in task.data_module.labeled_samples()])
    chosen = epoch_order(config.train.seed, 0, 80).at(np.arange(64))
    entered = layers[0](images[chosen]).double()
    statistics = exported(tmp_path / "run")
    torch.testing.assert_close(
        statistics["1.running_var"].double(),
        entered.var((0, 2, 3), correction=0),
        rtol=1e-4,
        atol=0,
    )
