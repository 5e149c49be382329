"""All4One against its authors' figures over two steps, with their positions, and as loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from figures import draw
from minitask import MiniTask
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.all4one import All4One, centroid_loss, feature_loss, sine_positions
from selftask.methods.nnclr import neighbor_loss
from selftask.models.feature_queue import FeatureQueue

SMALL: dict[str, Any] = {
    "out_dim": 6,
    "hidden_dim": 7,
    "predictor_dim": 6,
    "num_layers": 1,
    "num_heads": 2,
    "queue_size": 16,
    "num_neighbors": 3,
}

# solo-learn, which has the authors' code, for seeds 0 and 500, two steps each: the terms for
# neighbors, centroids and features, the loss, gradients of both views, sum of the queue afterwards
STEPS = [
    [
        (
            (2.6471498219286076, 2.20858562895843, 7.59438993023835, 6.225062690562694),
            (0.2076005147191617, 0.21905375682347092, 3.817882861625724),
        ),
        (
            (2.4391076582727496, 2.181038426621715, 6.22734932800054, 5.423747706447502),
            (0.2019317509228989, 0.20918048095790986, 7.7796799860844015),
        ),
    ],
    [
        (
            (2.1602900289191656, 2.192068126129194, 7.158701779510858, 5.7555299672796085),
            (0.18549501100679988, 0.1793240708608815, -5.192718855690546),
        ),
        (
            (2.8568728899916653, 2.1453536366742805, 6.782752497591677, 5.892489512128812),
            (0.19791131748490864, 0.20860079005210608, -0.801295084720498),
        ),
    ],
]


class AuthorsMean(nn.Module):
    """The mean of a sequence with positions as in the authors' code, along the features."""

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        channels = 2 * math.ceil(length / 2)
        self.positions = sine_positions(dim, channels)[:, :length].T.double()

    def forward(self, sequence: Tensor) -> Tensor:
        return (sequence + self.positions).mean(dim=1)


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_are_those_of_the_authors(case: int) -> None:
    seed, mixer = 500 * case, AuthorsMean(5, 16)
    assert mixer.positions.norm().item() == pytest.approx(5.657362829500422)
    queue = FeatureQueue(24, 16).double()
    queue.rows.copy_(F.normalize(draw(seed + 90, 24, 16), dim=1))
    for step, (terms, others) in enumerate(STEPS[case]):
        start = seed + 100 * step
        views = torch.stack([draw(start + i, 8, 16) for i in (0, 1)]).requires_grad_()
        teacher = F.normalize(torch.stack([draw(start + i, 8, 16) for i in (4, 5)]), dim=2)
        neighbors = queue.nearest_few(teacher, 5)
        neighbor = neighbor_loss(views, neighbors[:, :, 0], temperature=0.2)
        centroid = centroid_loss(0.5 * views, neighbors, mixer, temperature=0.1)
        feature = 10 * feature_loss(views, teacher.flip(0))
        loss = 0.5 * (neighbor + centroid + feature)
        (gradient,) = torch.autograd.grad(loss, views)
        queue.update(teacher[0])
        computed = [term.item() for term in (neighbor, centroid, feature, loss)]
        assert computed == pytest.approx(terms, rel=1e-8)
        computed = [*gradient.norm(dim=(1, 2)).tolist(), queue.rows.sum().item()]
        assert computed == pytest.approx(others, rel=1e-8)


def test_loss_compares_a_view_with_the_teacher_of_the_other() -> None:
    """Terms, weights and temperatures of the authors' code, by the functions that have them."""
    method = All4One(All4One.Config(**SMALL)).double()
    _, prediction, query = output = [draw(seed, 2, 5, 6) for seed in (1, 2, 3)]
    neighbors = F.normalize(draw(4, 2, 5, 3, 6), dim=3)
    teacher = F.normalize(draw(5, 2, 5, 6), dim=2)
    none = torch.empty(0, dtype=torch.int64)
    added = {"teacher": teacher, "neighbors": neighbors}
    batch = Batch(views={}, labels=none, index=none, key=none, added=added)
    terms = method(torch.stack(output, dim=2), batch)
    expected = {
        "neighbor": 0.5 * neighbor_loss(prediction, neighbors[:, :, 0], temperature=0.2),
        "centroid": 0.5 * centroid_loss(query, neighbors, method.mixer, temperature=0.1),
        "feature": 0.5 * 10 * feature_loss(prediction, teacher.flip(0)),
    }
    torch.testing.assert_close(terms, expected, rtol=1e-12, atol=0)


def test_the_centroid_is_the_first_output_of_the_transformer() -> None:
    mixer = All4One(All4One.Config(**SMALL)).double().mixer
    sequence = draw(1, 2, 3, 6)
    expected = mixer.encoder(sequence + mixer.positions)
    torch.testing.assert_close(mixer(sequence), expected[:, 0], rtol=1e-12, atol=0)
    assert not torch.allclose(expected[:, 0], expected.mean(dim=1), atol=1e-3)


def test_positions_number_the_neighbors() -> None:
    """As a formula; and a method that exchanges two neighbors gives another centroid."""
    positions = sine_positions(3, 4)
    for i in range(3):
        angles = i, i / 100
        values = [function(angle) for angle in angles for function in (math.sin, math.cos)]
        assert positions[i].tolist() == pytest.approx(values, abs=1e-6)
    method = All4One(All4One.Config(**SMALL)).double()
    neighbors = F.normalize(draw(1, 2, 3, 6), dim=2)
    exchanged = neighbors[:, [0, 2, 1]]
    assert method.mixer(neighbors).shape == (2, 6)
    assert not torch.allclose(method.mixer(neighbors), method.mixer(exchanged), atol=1e-6)


def test_feature_loss_is_that_of_the_paper() -> None:
    """As loops over dimensions; equal dimensions that are orthogonal give 0."""
    prediction, target = draw(1, 2, 5, 3), draw(2, 2, 5, 3)
    gaps, others = [], []
    for view in range(2):
        for i in range(3):
            for j in range(3):
                first, second = target[view, :, i], prediction[view, :, j]
                cosine = float(first @ second / first.norm() / second.norm())
                (gaps if i == j else others).append((cosine - 1) ** 2 if i == j else cosine**2)
    roots = [math.sqrt(sum(values) / len(values)) for values in (gaps, others)]
    assert feature_loss(prediction, target).item() == pytest.approx(sum(roots) / 2)
    same = torch.eye(5, dtype=torch.float64)[:, :3].expand(2, 5, 3).clone().requires_grad_()
    floor = feature_loss(same, same.detach())
    assert floor.item() == pytest.approx(0, abs=2e-6)
    assert torch.autograd.grad(floor, same)[0].isfinite().all()


def test_no_image_is_its_own_neighbor() -> None:
    """Neighbors are rows of the queue before the teacher's first view is enqueued."""
    task = MiniTask("all4one", SMALL)
    assert isinstance(task.base_model.head.projector[-1], nn.BatchNorm1d), "as in NNCLR"
    before = task.loss.queue.rows.clone()
    batch = task.run(1).last_batch
    gaps = (batch["neighbors"][:, :, :, None] - before).abs().amax(dim=4)
    assert gaps.amin(dim=3).max() == 0
    assert torch.equal(task.loss.queue.rows[:8], batch["teacher"][0])
    assert not batch["teacher"].requires_grad


def test_impossible_configs_are_refused() -> None:
    for option, message in (
        ("method.queue_size=4", "num_neighbors: 5 is more than the queue_size of 4"),
        ("method.num_heads=3", "out_dim: 128 must be even.*divisible by num_heads=3"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("all4one", [option])
