"""Collectives on two ranks against sums that are done by hand."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from selftask.distributed.collectives import (
    AnyFlag,
    all_gather_cat,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_sum,
    all_to_all_cat,
    average_statistics,
    barrier,
    broadcast_module,
    broadcast_tensors,
    gather_cat_with_grad,
    gather_objects,
    is_primary,
    rank,
    sum_with_equal_grad,
    sum_with_grad,
    world_size,
)

ROWS = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [13.0, 17.0]])  # two of each rank
WEIGHTS = torch.tensor([[0.5, -1.0], [2.0, 0.25], [1.5, 3.0], [-0.75, 4.0]])


def scattered(mine: Tensor) -> tuple[Tensor, bool]:
    """Return the gradient with a backend that is not called gloo; whether all was reduced."""
    reduced = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: "nccl")
        patch.setattr(dist, "all_reduce", lambda *args, **more: reduced.append(args))
        return _gradient((WEIGHTS * gather_cat_with_grad(mine)).sum(), mine), bool(reduced)


def collectives(_: int) -> dict[str, Any]:
    """What each collective returns on this rank, or on one rank without a process group."""
    mine = ROWS.chunk(world_size())[rank()].clone().requires_grad_()
    kept = mine.detach().clone()
    results: dict[str, Any] = {
        "who": (rank(), world_size(), is_primary()),
        "sum": all_reduce_sum(mine),
        "mean": all_reduce_mean(mine.detach()),
        "maximum": all_reduce_max(mine * (1 - 2 * rank())),
        "cat": all_gather_cat(mine),
        "exchanged": all_to_all_cat(mine, *[[len(mine) // world_size()] * world_size()] * 2),
        "objects": gather_objects({"of": rank()}),
    }
    results["input is as it was"] = torch.equal(mine.detach(), kept)
    results["gradient of cat"] = _gradient((WEIGHTS * gather_cat_with_grad(mine)).sum(), mine)
    results["gradient of cat by scattering"] = scattered(mine)
    weight = WEIGHTS[: len(mine)] * (rank() + 1)
    results["gradient of sum"] = _gradient((weight * sum_with_grad(mine)).sum(), mine)
    equal = (WEIGHTS[: len(mine)] * sum_with_equal_grad(mine)).sum()
    results["gradient of equal"] = _gradient(equal, mine)
    torch.manual_seed(rank())
    layer = nn.BatchNorm1d(3)
    nn.init.normal_(layer.weight)
    layer.running_mean += rank()
    broadcast_module(layer)
    results["broadcast"] = copy.deepcopy(layer.state_dict())
    tensors = [torch.tensor([1.5 + rank(), 2.5]), torch.tensor([[3 + rank()]]), layer.weight.data]
    tensors[2].add_(rank())
    broadcast_tensors(tensors)
    results["tensors"] = [tensor.tolist() for tensor in tensors[:2]]
    results["one of the tensors"] = layer.weight.detach().clone()
    layer.running_mean.fill_(1.0 + rank())
    layer.running_var.fill_(4.0 + 2 * rank())
    layer.num_batches_tracked.fill_(5 + rank())
    average_statistics(layer)
    results["statistics"] = [buffer.tolist() for buffer in layer.buffers()]
    time.sleep(0.2 * rank())
    came = time.monotonic()  # one clock for all processes
    barrier()
    results["barrier"] = (came, time.monotonic())
    flag = AnyFlag()
    results["flag"] = [flag.poll(rank() == 1), flag.poll(False), flag.poll(False), flag.drain()]
    return results


def _gradient(loss: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, x)
    return gradient


def test_two_ranks(rank_results: list[dict[str, Any]]) -> None:
    """Gradients are those of the sum of both ranks' losses."""
    torch.manual_seed(0)
    first = nn.init.normal_(torch.empty(3))
    latest = max(of_rank["collectives"]["barrier"][0] for of_rank in rank_results)
    for number, actual in enumerate(of_rank["collectives"] for of_rank in rank_results):
        assert actual["who"] == (number, 2, number == 0)
        assert actual["sum"].tolist() == [[8.0, 13.0], [16.0, 22.0]]
        assert actual["mean"].tolist() == [[4.0, 6.5], [8.0, 11.0]]
        assert actual["cat"].tolist() == ROWS.tolist()
        assert actual["maximum"].tolist() == [[1.0, 2.0], [3.0, 5.0]], "7 to 17 were negated"
        assert torch.equal(actual["exchanged"], ROWS[number::2])
        assert actual["objects"] == [{"of": 0}, {"of": 1}]
        assert actual["input is as it was"]
        assert torch.equal(actual["gradient of cat"], 2 * WEIGHTS.chunk(2)[number])
        gradient, reduced_all = actual["gradient of cat by scattering"]
        assert torch.equal(gradient, 2 * WEIGHTS.chunk(2)[number])
        assert not reduced_all
        assert torch.equal(actual["gradient of sum"], 3 * WEIGHTS[:2])  # 1 and 2 times
        assert torch.equal(actual["gradient of equal"], 2 * WEIGHTS[:2])
        assert torch.equal(actual["broadcast"]["weight"], first)
        assert actual["broadcast"]["running_mean"].tolist() == [0.0] * 3
        assert actual["tensors"] == [[1.5, 2.5], [[3]]], "those of rank 0"
        assert torch.equal(actual["one of the tensors"], first)
        assert actual["statistics"] == [[1.5] * 3, [5.0] * 3, 5], "means, and a count of rank 0"
        assert actual["flag"] == [False, True, False, False], "rank 1 said so, a poll before"
        assert actual["barrier"][1] >= latest


def test_nobody_leaves_a_barrier_before_all_have_come(rank_results: list[dict[str, Any]]) -> None:
    came, left = zip(*(of_rank["collectives"]["barrier"] for of_rank in rank_results), strict=True)
    assert max(came) <= min(left)


def test_one_process() -> None:
    actual = collectives(0)
    assert actual["who"] == (0, 1, True)
    for name in ("sum", "mean", "cat", "maximum", "exchanged"):
        assert torch.equal(actual[name], ROWS)
    assert actual["objects"] == [{"of": 0}]
    assert torch.equal(actual["gradient of cat"], WEIGHTS)
    assert torch.equal(actual["gradient of sum"], WEIGHTS)
    assert torch.equal(actual["gradient of equal"], WEIGHTS)
    assert actual["tensors"] == [[1.5, 2.5], [[3]]]
    assert actual["statistics"] == [[1.0] * 3, [4.0] * 3, 5]
    assert actual["flag"] == [False] * 4


ON_RANKS = (collectives,)
