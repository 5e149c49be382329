"""KoLeo against a loop, the figures of DINOv2's and DINOv3's code, and itself on several ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from selftask.distributed.collectives import all_reduce_mean, world_size
from selftask.models.losses.koleo import koleo


def draw(seed: int, *shape: int) -> Tensor:
    """Inputs of the figures, which the authors' own code gave."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("neighbors", "group_size"), [(1, None), (3, None), (1, 4), (2, 4)])
def test_koleo_is_the_log_distance_to_the_nearest_neighbors(
    neighbors: int, group_size: int | None
) -> None:
    rows = [[x / math.hypot(*row) for x in row] for row in draw(0, 8, 4).tolist()]
    size, terms = group_size or 8, list[float]()
    for i, row in enumerate(rows):
        first = i // size * size
        others = [rows[j] for j in range(first, first + size) if j != i]
        distances = sorted(math.dist(row, other) for other in others)
        terms += [-math.log(distance) for distance in distances[:neighbors]]
    ours = koleo(draw(0, 8, 4), neighbors=neighbors, group_size=group_size)
    assert ours.item() == pytest.approx(sum(terms) / len(terms), rel=1e-6)


# facebookresearch/dinov3, KoLeoLossDistributed on one rank, in float32: loss, norm of its gradient
DINOV3 = {
    (0, 1): (-0.1916975975036621, 0.13212097978433718),
    (0, 2): (-0.21980740129947662, 0.09172364669964135),
    (500, 1): (-0.1498972326517105, 0.15927240999633593),
    (500, 2): (-0.20762525498867035, 0.09921685121086764),
}


@pytest.mark.parametrize(("seed", "neighbors"), DINOV3)
def test_several_neighbors_are_those_of_dinov3(seed: int, neighbors: int) -> None:
    features = draw(seed + 2, 6, 12).requires_grad_()
    loss = koleo(features, neighbors=neighbors)
    loss.backward()
    assert features.grad is not None
    figures = loss.item(), features.grad.norm().item()
    assert figures == pytest.approx(DINOV3[seed, neighbors], rel=1e-6)


def test_the_loss_of_groups_is_the_mean_of_theirs() -> None:
    features = draw(6, 8, 16).requires_grad_()
    koleo(features, group_size=4).backward()
    alone = draw(6, 8, 16).requires_grad_()
    torch.stack([koleo(group) for group in alone.chunk(2)]).mean().backward()
    torch.testing.assert_close(features.grad, alone.grad)


def test_two_opposite_rows_are_neighbors() -> None:
    """Their similarity is the least that there is; they are 2 apart."""
    features = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    loss = koleo(features)
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(2))
    assert features.grad is not None and features.grad.isfinite().all()


def test_equal_rows_have_a_finite_loss_and_gradient() -> None:
    features = torch.ones(2, 8, requires_grad=True)
    loss = koleo(features)
    loss.backward()
    assert features.grad is not None
    assert loss.isfinite() and features.grad.isfinite().all()


def test_koleo_is_that_of_the_authors_code() -> None:
    features = draw(6, 8, 16).requires_grad_()
    loss = koleo(features)
    loss.backward()
    assert features.grad is not None
    assert loss.item() == pytest.approx(-0.015766942207647225, rel=1e-9)
    assert features.grad.norm().item() == pytest.approx(0.14607424901827143, rel=1e-9)


def test_the_loss_is_not_rounded_under_autocast() -> None:
    features = draw(6, 8, 16).float()
    expected = koleo(features)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(koleo(features), expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("neighbors", "group_size"), [(1, None), (2, None), (1, 2), (2, 4)])
def test_ranks_have_the_loss_and_gradient_of_one(
    num_ranks: int, neighbors: int, group_size: int | None
) -> None:
    """Groups are parts of a rank's rows, the rows of a rank, or those of two ranks."""
    options = {"neighbors": neighbors, "group_size": group_size}
    features = draw(6, 8, 16).requires_grad_()
    loss = koleo(features, **options)
    loss.backward()
    assert features.grad is not None
    parts = features.grad.chunk(num_ranks)
    for expected, (part, gradient) in zip(
        parts, run_ranks(_on_rank, num_ranks, options), strict=True
    ):
        assert part == pytest.approx(loss.item(), rel=1e-12)
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)


def _on_rank(rank: int, options: dict[str, Any]) -> tuple[float, Tensor]:
    """Mean loss over ranks; gradient of the mean with respect to this rank's features."""
    mine = draw(6, 8, 16).chunk(world_size())[rank].clone().requires_grad_()
    loss = koleo(mine, **options)
    (loss / world_size()).backward()
    assert mine.grad is not None
    return all_reduce_mean(loss.detach()).item(), mine.grad
