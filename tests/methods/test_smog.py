"""SMoG against the figures of lightly's code, and its groups over some steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.smog import grouping_loss, moved_groups, nearest_group
from selftask.models.clustering import spherical_kmeans
from selftask.random.splitmix import hash_words

# lightly, two steps for seeds 0 and 500: loss, sum of the assigned groups, norm of the moved
# groups, gradients of projection and prediction
PUBLISHED = {
    0: [
        (6.602833383535185, 22, 7.3187418125184625, 0.010792461086968283, 1.595604734170225),
        (6.586719232887701, 22, 7.297570617192651, 0.006514999982153343, 1.9007588712749761),
    ],
    500: [
        (3.7301396350245772, 22, 7.317594372865701, 0.010805630545792992, 0.899476604006422),
        (5.54769916271123, 13, 7.289662675009554, 0.00720547436530131, 1.5201997107170822),
    ],
}


@pytest.mark.parametrize("seed", PUBLISHED)
def test_two_steps_are_those_of_lightly(seed: int) -> None:
    groups = draw(seed + 30, 6, 8)
    for step, figures in enumerate(PUBLISHED[seed]):
        first = seed + 40 + 10 * step
        projection, prediction = (draw(first + n, 8, 8).requires_grad_() for n in range(2))
        group = nearest_group(draw(first + 2, 8, 8), groups)
        groups = moved_groups(groups.detach(), projection, momentum=0.99)
        loss = grouping_loss(prediction[None], groups, group[None], temperature=0.1)
        norms = [g.norm().item() for g in torch.autograd.grad(loss, (projection, prediction))]
        actual = (loss.item(), group.sum().item(), groups.norm().item(), *norms)
        assert actual == pytest.approx(figures, rel=1e-9)


def test_groups_without_members_stay() -> None:
    groups = torch.eye(3, dtype=torch.float64)
    moved = moved_groups(groups, torch.tensor([[0.0, 1.0, 1.0]]).double(), momentum=0.9)
    assert torch.equal(moved[[0, 2]], groups[[0, 2]])
    assert moved[1].tolist() == pytest.approx([0, 1, 0.1])


def test_groups_move_at_each_step_and_are_set_anew_by_k_means() -> None:
    config = {"out_dim": 5, "hidden_dim": 7, "num_groups": 4, "queue_size": 32}
    task = MiniTask("smog", config)
    method = task.loss
    start = method.groups.clone()
    task.run(1)
    units = F.normalize(task.last_batch.output[:, :, 0].detach(), dim=2)  # projections
    expected = moved_groups(start, units.flatten(0, 1), momentum=0.99)
    assert not torch.equal(expected, start)
    torch.testing.assert_close(method.groups, expected, rtol=0, atol=1e-12)
    rows = method.queue.rows.clone()
    for trained_batches in (3, 4):  # the queue has 32 images after 4 batches
        before = method.groups.clone()
        clock = SimpleNamespace(epoch=1, batch_in_epoch=0, trained_batches=trained_batches)
        state: Any = SimpleNamespace(
            train=True, clock=clock, config=task.config, length=task.length
        )
        method.on_phase_start(state)
        assert torch.equal(method.groups, before) == (trained_batches == 3)
    assert torch.equal(method.queue.rows, rows)
    draws = torch.Generator().manual_seed(hash_words(task.config.train.seed, 0x736D6F67, 1))
    expected, _ = spherical_kmeans(method.queue.rows, 4, generator=draws)
    assert torch.equal(method.groups, expected)


def test_grouping_loss_of_perfect_and_of_equal_predictions() -> None:
    """Predictions at their groups: the floor of cosines 1 and 0; the same for all: ln K."""
    groups = torch.eye(4, dtype=torch.float64)
    group = torch.arange(4)[None]
    floor = math.log(math.exp(1 / 0.1) + 3) - 1 / 0.1
    loss = grouping_loss(groups[None], groups, group, temperature=0.1)
    assert loss.item() == pytest.approx(floor, rel=1e-12)
    same = F.normalize(torch.ones(1, 4, 4, dtype=torch.float64), dim=2)
    loss = grouping_loss(same, groups, group, temperature=0.1)
    assert loss.item() == pytest.approx(math.log(4), rel=1e-12)


def test_a_queue_smaller_than_the_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="queue_size: 100 images cannot make num_groups=3000"):
        load_config("smog", ["method.queue_size=100", "method.num_groups=3000"])


def test_a_view_predicts_the_group_of_the_other_view() -> None:
    task = MiniTask("smog", {"out_dim": 5, "hidden_dim": 7, "num_groups": 20, "queue_size": 32})
    batch = task.forward(torch.arange(24))
    first, second = F.normalize(task.loss.teacher(batch.input), dim=2)
    groups = [(view @ task.loss.groups.T).argmax(dim=1) for view in (second, first)]
    assert not torch.equal(*groups)
    assert torch.equal(batch["group"], torch.stack(groups))
