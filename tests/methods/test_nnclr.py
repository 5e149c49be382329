"""NNCLR against solo-learn's figures over two steps, and as loops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask
from selftask.methods.nnclr import NNCLR, neighbor_loss
from selftask.models.feature_queue import FeatureQueue

# solo-learn, for seeds 0 and 500, two steps each: loss, gradients of both predictions, sum of the
# indices of the first view's neighbors, sum of the queue afterwards
STEPS = [
    [
        (4.245926299284594, 0.5958861613739219, 0.43996586505584956, 101, 3.1104758355685957),
        (3.637890904197961, 0.5661029586191052, 0.49120807989180804, 83, 1.8867522770916292),
    ],
    [
        (4.230386725667472, 0.5084614785445855, 0.603267983489983, 81, -2.249817788958933),
        (4.132484132581514, 0.6418515645566353, 0.5473054305725591, 77, 1.7521672953737364),
    ],
]


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_are_those_of_solo_learn(case: int) -> None:
    seed = 500 * case
    queue = FeatureQueue(24, 16).double()
    queue.rows.copy_(F.normalize(draw(seed + 90, 24, 16), dim=1))
    for step, figures in enumerate(STEPS[case]):
        start = seed + 100 * step
        projection = F.normalize(torch.stack([draw(start + v, 8, 16) for v in (0, 1)]), dim=2)
        prediction = torch.stack([draw(start + v, 8, 16) for v in (2, 3)]).requires_grad_()
        neighbors = queue.nearest(projection)
        indices = (neighbors[0] @ queue.rows.T).argmax(dim=1).sum().item()
        loss = neighbor_loss(prediction, neighbors, temperature=0.1)
        (gradient,) = torch.autograd.grad(loss, prediction)
        queue.update(projection[0])
        norms = gradient.norm(dim=(1, 2)).tolist()
        computed = (loss.item(), *norms, indices, queue.rows.sum().item())
        assert computed == pytest.approx(figures, rel=1e-8)


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 3 as loops: the neighbor of one view's projection against the other's predictions."""
    prediction = draw(1, 2, 4, 5)
    neighbors = F.normalize(draw(2, 2, 4, 5), dim=2)
    loss = 0.0
    for view in range(2):
        units = [p / p.norm() for p in prediction[1 - view]]
        for i in range(4):
            scores = [float(neighbors[view, i] @ unit) / 0.2 for unit in units]
            loss += (math.log(sum(map(math.exp, scores))) - scores[i]) / 8
    assert neighbor_loss(prediction, neighbors, temperature=0.2).item() == pytest.approx(loss)


def test_no_image_is_its_own_neighbor() -> None:
    """The queue takes the projections of a batch after its step, those of the first view."""
    task = MiniTask("nnclr", {"queue_size": 8, "out_dim": 5, "hidden_dim": 7, "predictor_dim": 6})
    before = task.loss.queue.rows.clone()
    task.run(1)
    assert not torch.equal(task.loss.queue.rows, before)
    neighbors = task.last_batch["neighbors"]
    nearest = (task.last_batch.output[:, :, 0] @ before.T).argmax(dim=2)  # of projections
    assert torch.equal(neighbors, before[nearest])


def test_chance_is_the_loss_of_equal_similarities() -> None:
    method: NNCLR = MiniTask("nnclr", {"queue_size": 4, "out_dim": 5}, batch_size=4).loss
    output = torch.ones(2, 4, 5, dtype=torch.float64)
    loss = neighbor_loss(output, F.normalize(output, dim=2), temperature=0.1)
    assert loss.item() == pytest.approx(method.chance_loss)
