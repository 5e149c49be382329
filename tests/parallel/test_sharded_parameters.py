"""What FSDP shards: optimizers and clipping do as with whole parameters; types of blocks."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_student import ON_CPU, Student, data, reduction, whole
from torch import Tensor, nn

from selftask.hooks.failures.non_finite import NonFiniteLoss, check_weights
from selftask.optim.gradients import clip_adaptively, clip_norm, clip_value, gradients
from selftask.optim.optimizers.lamb import LAMB
from selftask.optim.optimizers.larc import LARC
from selftask.optim.optimizers.lars import LARS
from selftask.optim.optimizers.lion import Lion
from selftask.optim.optimizers.schedule_free import ScheduleFreeAdamW
from selftask.parallel.fsdp import FSDPReduction


def optimizers(rank: int) -> dict[str, list[Tensor]]:
    """Norms of sharded parameters are those of whole ones, in clipping and in optimizers."""
    copies: dict[str, Any] = {"shard_over": 1}
    ways: list[tuple[str, dict[str, Any]]] = [("manual", {}), ("fsdp", {}), ("fsdp", copies)]
    return {name: [_one_update(name, way, **more) for way, more in ways] for name in KINDS}


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lars": (LARS, {"trust_coefficient": 0.1}),
    "larc": (LARC, {"trust_coefficient": 0.1}),
    "lamb": (LAMB, {}),
    "lion": (Lion, {}),
    "schedule_free": (ScheduleFreeAdamW, {"interpolation": 0.5, "beta2": 0.9, "eps": 1e-8}),
}


def _one_update(name: str, way: str, **more: Any) -> Tensor:
    torch.manual_seed(0)
    student = Student().double()
    sharing = reduction(way, **more)
    sharing.shard([student], ON_CPU)
    named = [(n, p) for n, p in student.named_parameters() if p.requires_grad]
    sharing.register(named)
    groups = sharing.regroup([{"params": [p for _, p in named], "lr": 1.0, "weight_decay": 0.1}])
    kind, options = KINDS[name]
    optimizer = kind(groups, **options)
    sharing.wrap(student)(list(data()[0])).square().mean().backward()
    sharing.reduce()
    parameters = [p for _, p in named]
    for order in (1.0, math.inf):
        clip_norm(gradients(parameters), 0.05, p=order, each=order == 1.0)
    clip_adaptively(parameters, 0.05)
    clip_value(gradients(parameters), 0.01)
    optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return torch.cat([whole(p).flatten() for _, p in named])


@pytest.mark.parametrize("name", KINDS)
def test_optimizers_of_sharded_parameters(name: str, rank_results: list[dict[str, Any]]) -> None:
    for manual, *sharded in (of_rank["optimizers"][name] for of_rank in rank_results):
        for fsdp in sharded:
            torch.testing.assert_close(manual, fsdp, rtol=1e-9, atol=1e-12)


class Narrow(nn.Module):
    """A linear layer, with BatchNorm or without; keeps the type of the weights in use."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.linear.weight.dtype
        y: Tensor = self.norm(self.linear(x.to(self.seen)))
        return y


def low_precision(rank: int) -> dict[str, Any]:
    """Types of the weights of two blocks and of the head in the forward pass, and of gradients."""
    network = nn.Module()
    network.blocks = nn.ModuleList([Narrow(norm=False), Narrow(norm=True)])
    sharing = FSDPReduction(low_precision=torch.bfloat16)
    sharing.shard([network], ON_CPU)
    x = torch.randn(4, 6)
    for block in network.blocks:
        x = block(x)
    x.square().sum().backward()
    grads = [p.grad for p in network.parameters()]
    return {
        "seen": [block.seen for block in network.blocks],
        "statistics": network.blocks[1].norm.running_mean.dtype,
        "gradients": {grad.dtype for grad in grads if grad is not None},
        "kept": {p.dtype for p in network.parameters()},
    }


def test_blocks_with_batch_norm_stay_in_float32(rank_results: list[dict[str, Any]]) -> None:
    for result in (of_rank["low_precision"] for of_rank in rank_results):
        assert result["seen"] == [torch.bfloat16, torch.float32]
        assert result["statistics"] == torch.float32
        assert result["gradients"] == result["kept"] == {torch.float32}


def abandoned(rank: int) -> list[list[Tensor]]:
    """Gradients of a step of two batches before and after an abandoned one, in both precisions."""
    results = []
    for low in (None, torch.bfloat16):
        torch.manual_seed(0)
        network = nn.Module()
        network.blocks = nn.ModuleList([Narrow(norm=False), Narrow(norm=False)])
        sharing = FSDPReduction(low_precision=low)
        sharing.shard([network], ON_CPU)
        sharing.register([*network.named_parameters()])
        x = torch.randn(4, 6)
        for batches in (2, 1, 2):
            network.zero_grad()
            for number in range(batches):
                with nullcontext() if number else sharing.no_sync():
                    network.blocks[1](network.blocks[0](x)).float().square().mean().backward()
            sharing.reduce() if batches == 2 else sharing.discard()
            if batches == 2:
                results.append([whole(p.grad) for p in network.parameters()])
    return results


def test_an_abandoned_step_leaves_no_gradient(rank_results: list[dict[str, Any]]) -> None:
    for result in (of_rank["abandoned"] for of_rank in rank_results):
        for before, after in (result[:2], result[2:]):
            assert all(map(torch.equal, before, after))


def one_bad_shard(rank: int) -> str:
    """What the check before a save says if one shard, on rank 1 alone, is not finite."""
    network = Narrow(norm=True)
    sharing = FSDPReduction(low_precision=None)
    sharing.shard([network], ON_CPU)
    if rank == 1:
        network.linear.weight.to_local().data[-1, -1] = torch.nan
    task: Any = SimpleNamespace(
        trained=[("network", network)],
        device=torch.device("cpu"),
        steps_done=3,
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
    )
    with pytest.raises(NonFiniteLoss) as error:
        check_weights(task)
    return str(error.value)


def test_all_ranks_refuse_to_save_if_one_shard_is_not_finite(
    rank_results: list[dict[str, Any]],
) -> None:
    first, second = (of_rank["one_bad_shard"] for of_rank in rank_results)
    assert first.startswith("weights are not finite after step 3; lr was 0.1")
    assert second.startswith("weights are not finite after step 3: network.linear.weight; lr was")


ON_RANKS = (optimizers, low_precision, abandoned, one_bad_shard)
