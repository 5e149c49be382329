"""``parallel.reduce=manual``: gradients on some ranks only, in half the bytes, under way early."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selftask.config.schema import ParallelConfig
from selftask.errors import RunError
from selftask.parallel import manual, unused
from selftask.parallel.build import build_reduction
from selftask.parallel.ddp import DDPReduction
from selftask.parallel.manual import ManualReduction


def one_sided(rank: int) -> tuple[list[list[Tensor | None]], list[str]]:
    """Each step another parameter has a gradient on one rank only; one has none anywhere, once."""
    a, b, c = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    d = nn.Parameter(torch.ones(2))
    parameters = [a, b, c, d]
    sharing = ManualReduction(bucket_mb=1e-6)
    sharing.register([(name, p) for name, p in zip("abcd", parameters, strict=True)])
    seen = []
    for step in range(4):
        for p in parameters:
            p.grad = None
        loss = (a * (rank + 1.0)).sum() + (d.double() * 4 * rank).sum()
        if step % 2 == rank:
            loss = loss + (b * 6.0).sum()
        if step == 3 and rank == 1:
            loss = loss + (c * 2.0).sum()
        loss.backward()
        sharing.reduce()
        seen.append([None if p.grad is None else p.grad.clone() for p in parameters])
    strict = DDPReduction()
    strict.wrap(nn.ParameterList([a, b]))
    strict.register([("network.a", a), ("network.b", b)])
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b) if rank else None
    try:
        strict.reduce()
    except RunError as error:
        return seen, str(error).splitlines()
    return seen, []


def test_a_gradient_on_one_rank_only(rank_results: list[dict[str, Any]]) -> None:
    for seen, message in (of_rank["one_sided"] for of_rank in rank_results):
        for step, (a, b, c, d) in enumerate(seen):
            assert a.tolist() == [1.5] * 3
            assert b.tolist() == [3.0] * 3, "zero on the other rank"
            assert d.tolist() == [2.0] * 2
            assert c is None if step < 3 else c.tolist() == [1.0] * 3
        assert message[:2] == [
            "parameter without a gradient in the first step:",
            "  network.b (has one on 1 of 2 ranks)",
        ]


def second_backward(rank: int) -> str:
    weight = nn.Parameter(torch.ones(3))
    sharing = ManualReduction()
    sharing.register([("network.weight", weight)])
    (weight * 2).sum().backward()
    sharing.reduce()
    (weight * 2).sum().backward()
    try:
        (weight * 2).sum().backward()
    except RunError as error:
        return str(error)
    return ""


def compressed(rank: int) -> dict[str, Tensor]:
    """Sums in half the bytes; a gradient that is scaled for float16 stays in its range."""
    gradients = {}
    kinds: tuple[Any, ...] = ("none", "fp16", "bf16")
    for compression in kinds:
        weight = nn.Parameter(torch.ones(1000))
        sharing = build_reduction(ParallelConfig(grad_compression=compression), None)
        sharing.register([("weight", weight)])
        draws = torch.Generator().manual_seed(rank)
        weight.grad = torch.randn(1000, generator=draws) * 1e4
        sharing.reduce()
        gradients[compression] = weight.grad.clone()
    return gradients


def memory_format(rank: int) -> bool:
    """Gradients keep the strides of their parameters: optimizers are slow without."""
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    sharing = ManualReduction()
    sharing.register(list(conv.named_parameters()))
    conv(torch.ones(2, 3, 8, 8)).sum().backward()
    before = conv.weight.grad.clone()
    sharing.reduce()
    assert torch.allclose(conv.weight.grad, before)
    return conv.weight.grad.stride() == conv.weight.stride() != before.contiguous().stride()


def overlap(rank: int) -> list[int]:
    """How many buckets are on their way when the backward pass ends."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    sharing: Any = build_reduction(ParallelConfig(bucket_mb=1e-5), None)
    sharing.register(list(layers.named_parameters()))
    counts = []
    for step in range(3):
        layers.zero_grad()
        with sharing.no_sync() if step == 2 else nullcontext():
            layers(torch.ones(2, 4)).sum().backward()
        counts.append(sharing._next)
        sharing.reduce()
    return counts


def without_overlap(rank: int) -> list[list[float]]:
    """Gradients of several backward passes, of which some are under ``no_sync``."""
    weight = nn.Parameter(torch.ones(2))
    sharing = ManualReduction(overlap=False)
    sharing.register([("weight", weight)])
    gradients = []
    for passes in range(1, 4):
        weight.grad = None
        for number in range(passes):
            with sharing.no_sync() if number % 2 == 0 else nullcontext():
                (weight * (rank + 1.0)).sum().backward()
        sharing.reduce()
        gradients.append(weight.grad.tolist())
    return gradients


def details(rank: int) -> tuple[Any, ...]:
    results = second_backward(rank), compressed(rank), memory_format(rank), overlap(rank)
    return *results, without_overlap(rank)


def test_details_of_manual_reduction(rank_results: list[dict[str, Any]]) -> None:
    for message, reduced, kept, counts, several in (part["details"] for part in rank_results):
        assert "a second backward pass" in message
        assert "network.weight" in message
        assert "task.no_sync()" in message
        exact = reduced["none"]
        for compression, error in (("fp16", 1.5e-3), ("bf16", 1.2e-2)):
            assert not torch.equal(reduced[compression], exact)
            assert torch.allclose(reduced[compression], exact, rtol=0, atol=error * 4e4)
        assert kept
        assert counts == [0, 8, 0]
        assert several == [[1.5] * 2, [3.0] * 2, [4.5] * 2]


def partly_early(rank: int) -> list[int]:
    """Number of launched buckets after each backward pass, if rank 1 lacks one gradient at first.

    Both ranks have it in the second step, but no hook may launch its bucket.
    """
    a, b = (nn.Parameter(torch.ones(3)) for _ in range(2))
    sharing = ManualReduction(bucket_mb=1e-6)
    sharing.register([("a", a), ("b", b)])
    counts = []
    for step in range(2):
        a.grad = b.grad = None
        (a.sum() + b.sum() if step or rank == 0 else a.sum()).backward()
        counts.append(sharing._next)
        sharing.reduce()
    return counts


def test_a_gradient_of_some_ranks_is_sent_after_the_backward_pass(
    rank_results: list[dict[str, Any]],
) -> None:
    """Else the order of collectives in one group would depend on the rank."""
    assert [of_rank["partly_early"] for of_rank in rank_results] == [[0, 1], [0, 1]]


def idle_on_the_host(rank: int) -> list[list[float] | None]:
    """Gradients of a parameter that rank 1 alone uses, in the third step.

    The backend is called NCCL, and after the first step the default group may not be asked.
    """
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manual.dist, "get_backend", lambda: "nccl")
        patch.setattr(unused, "collective_device", lambda: torch.device("cpu"))
        sharing = ManualReduction()
        sharing.register([("used", used), ("idle", idle)])
        for step in range(3):
            used.grad = idle.grad = None
            (used.sum() + idle.sum() if step == 2 and rank else used.sum()).backward()
            sharing.reduce()
            gradients.append(None if idle.grad is None else idle.grad.tolist())
            patch.setattr(unused, "collective_device", lambda: torch.device("meta"))
    return gradients


def test_the_host_waits_for_no_device_because_of_an_idle_parameter(
    rank_results: list[dict[str, Any]],
) -> None:
    gradients = [of_rank["idle_on_the_host"] for of_rank in rank_results]
    assert gradients == [[None, None, [0.5, 0.5]]] * 2


@pytest.mark.parametrize(
    ("backend", "groups"), [("gloo", ["new", "new"]), ("nccl", [None]), ("xccl", [None])]
)
def test_groups_of_buckets(
    backend: str, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two NCCL communicators in one backward pass may wait for each other."""
    monkeypatch.setattr(manual.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(manual, "new_group", lambda: "new")
    assert manual.bucket_groups() == groups


ON_RANKS = (one_sided, details, partly_early, idle_on_the_host)
