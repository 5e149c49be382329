"""MSF against its authors' figures over two steps, as loops, and against BYOL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.byol import regression_loss
from selftask.methods.msf import mean_shift_loss
from selftask.models.feature_queue import FeatureQueue

SMALL: dict[str, Any] = {
    "out_dim": 5,
    "hidden_dim": 7,
    "queue_size": 20,
    "num_neighbors": 3,
    "momentum": 0.9,
}

# UMBCvision/MSF for seeds 0 and 500, two steps each: loss, gradient of the query, sum of the queue
STEPS = [
    [
        (1.8579957588293234, 0.13234922420665182, -3.155584896942506),
        (1.9849771312861149, 0.13651390301280225, -0.537902366155502),
    ],
    [
        (2.1004806312904565, 0.12681918037796652, -3.5598758612683907),
        (2.0125247805575555, 0.12976915557627114, -5.515753720885254),
    ],
]


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_are_those_of_the_authors(case: int) -> None:
    seed = 500 * case
    queue = FeatureQueue(24, 12).double()
    queue.rows.copy_(F.normalize(draw(seed + 90, 24, 12), dim=1))
    for step, figures in enumerate(STEPS[case]):
        start = seed + 100 * step
        query = draw(start, 8, 12).requires_grad_()
        targets = F.normalize(draw(start + 1, 8, 12), dim=1)
        loss = mean_shift_loss(query, queue.nearest_few(targets, 5, after=targets))
        (gradient,) = torch.autograd.grad(loss, query)
        queue.update(targets)
        computed = (loss.item(), gradient.norm().item(), queue.rows.sum().item())
        assert computed == pytest.approx(figures, rel=1e-9)


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 1 as loops; with one neighbor, the image itself, it is BYOL in one direction."""
    prediction, neighbors = draw(1, 3, 5), F.normalize(draw(2, 3, 2, 5), dim=2)
    total = 0.0
    for i in range(3):
        for neighbor in neighbors[i]:
            total += float((prediction[i] / prediction[i].norm() - neighbor).square().sum()) / 6
    assert mean_shift_loss(prediction, neighbors).item() == pytest.approx(total, rel=1e-12)
    one = mean_shift_loss(prediction, neighbors[:, :1])
    byol = regression_loss(prediction[None], neighbors[None, :, 0])
    assert one.item() == pytest.approx(byol.item(), rel=1e-12)
    assert mean_shift_loss(3 * neighbors[:, 0], neighbors[:, :1]).item() == pytest.approx(0)


def test_the_first_neighbor_is_the_image_and_others_are_in_the_queue_after_the_step() -> None:
    task = MiniTask("msf", SMALL).run(4)
    neighbors, rows = task.last_batch["neighbors"], task.loss.queue.rows
    assert neighbors.shape == (8, 3, 5) and not neighbors.requires_grad
    gaps = (neighbors[:, :, None] - rows).abs().amax(dim=3)  # (8, 3, 20)
    assert gaps.amin(dim=2).max() < 1e-12
    newest = (task.loss.queue.oldest - 8 + torch.arange(8)) % 20
    assert torch.allclose(neighbors[:, 0], rows[newest], rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [6, 20])
def test_neighbors_after_an_update_are_those_of_the_updated_queue(size: int) -> None:
    """Also if more rows enter than the queue has."""
    queue = FeatureQueue(size, 4).double()
    for step in range(4):
        rows, queries = (F.normalize(draw(s, 9, 4), dim=1) for s in (10 + step, 20 + step))
        before = queue.nearest_few(queries, 3, after=rows)
        queue.update(rows)
        assert torch.allclose(before, queue.nearest_few(queries, 3), rtol=0, atol=1e-12)


def test_neighbors_are_not_ties_under_autocast() -> None:
    """Cosines of similar entries differ by less than bfloat16 holds."""
    queue, queries = FeatureQueue(64, 32), draw(1, 16, 32).float()
    queue.rows.copy_(F.normalize(1 + 0.05 * draw(0, 64, 32).float(), dim=1))
    expected = queue.nearest_few(queries, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(queue.nearest_few(queries, 3), expected)


def test_more_neighbors_than_the_queue_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_neighbors: 5 is more than the queue_size of 4"):
        load_config("msf", ["method.queue_size=4"])
