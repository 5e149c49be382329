"""KoLeo against a loop, the figures of DINOv2's code, and itself on two ranks."""

from __future__ import annotations

import math

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


def test_koleo_is_the_log_distance_to_the_nearest_neighbour() -> None:
    rows = [[x / math.hypot(*row) for x in row] for row in draw(0, 7, 4).tolist()]
    terms = []
    for i, row in enumerate(rows):
        distances = [math.dist(row, other) for j, other in enumerate(rows) if j != i]
        terms.append(-math.log(min(distances)))
    assert koleo(draw(0, 7, 4)).item() == pytest.approx(sum(terms) / 7, rel=1e-6)


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


def test_neighbours_are_looked_for_on_all_ranks() -> None:
    features = draw(6, 8, 16).requires_grad_()
    loss = koleo(features)
    loss.backward()
    assert features.grad is not None
    for rank, (part, gradient) in enumerate(run_ranks(_on_rank, 2)):
        assert part == pytest.approx(loss.item(), rel=1e-12)
        expected = features.grad[4 * rank : 4 * rank + 4]
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)


def _on_rank(rank: int) -> tuple[float, Tensor]:
    """Mean loss over ranks; gradient of the mean with respect to this rank's features."""
    mine = draw(6, 8, 16).chunk(world_size())[rank].clone().requires_grad_()
    loss = koleo(mine)
    (loss / world_size()).backward()
    assert mine.grad is not None
    return all_reduce_mean(loss.detach()).item(), mine.grad
