"""Averages of BatchNorm's statistics on two ranks, each of which sees other images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from selftask.config.run_length import RunLength
from selftask.distributed.collectives import broadcast_tensors
from selftask.hooks.averages.ema import ExponentialAverage
from selftask.parallel.reduction import Reduction

STATISTICS = ("1.running_mean", "1.running_var")
KEPT = 0.75  # decay of the average


def images(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(8, 3, generator=generator) * (1 + rank) + 5 * rank


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def averaged(rank: int, at_a_save: bool) -> tuple[dict[str, Tensor], ...]:
    """Statistics of the average after three steps, of the network during and after its use."""
    model = network()
    hook = ExponentialAverage(decay=KEPT, warmup=False, buffers="average")
    task: Any = SimpleNamespace(
        base_model=model,
        named_hooks={"ema": hook},
        averages={},
        reduction=Reduction(),
        length=RunLength(num_samples=48, batch_size=16, max_steps=3),
        loss=SimpleNamespace(export_backbone=lambda network: network[0]),
        sync_buffers=lambda: broadcast_tensors(model.buffers()),
    )
    hook.on_start(task)
    for task.steps_done in range(3):
        model(images(rank, task.steps_done))
        hook.on_update(task)
    own = {name: hook.weights[name].clone() for name in STATISTICS}
    if at_a_save:
        hook.before_save(task)
        kept = hook.state_dict()["weights"]
        return own, {name: kept[name].clone() for name in STATISTICS}, {}
    with hook.in_place(task):
        used = {name: model.state_dict()[name].clone() for name in STATISTICS}
    return own, used, {name: model.state_dict()[name] for name in STATISTICS}


def of_rank_0() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Average and last value of rank 0's statistics, by the formulas in float64."""
    model = network().double()
    last = {name: model.state_dict()[name].clone() for name in STATISTICS}
    average = dict(last)
    for step in range(3):
        rows = model[0](images(0, step).double())
        new = dict(zip(STATISTICS, (rows.mean(dim=0), rows.var(dim=0)), strict=True))
        last = {name: 0.9 * last[name] + 0.1 * new[name] for name in STATISTICS}
        average = {name: KEPT * average[name] + (1 - KEPT) * last[name] for name in STATISTICS}
    return average, last


@pytest.mark.parametrize("at_a_save", [False, True])
def test_every_rank_uses_and_saves_the_average_of_rank_0(at_a_save: bool) -> None:
    average, last = of_rank_0()
    (own, first_used, first_after), (other, used, after) = run_ranks(averaged, 2, at_a_save)
    assert all(not torch.allclose(own[name], other[name], rtol=0.01) for name in STATISTICS)
    for name in STATISTICS:
        for value in (own[name], first_used[name], used[name]):
            torch.testing.assert_close(value.double(), average[name], rtol=1e-5, atol=1e-6)
        for state in (first_after, after) if not at_a_save else ():
            torch.testing.assert_close(state[name].double(), last[name], rtol=1e-5, atol=1e-6)
