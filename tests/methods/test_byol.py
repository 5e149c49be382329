"""BYOL against its paper, lightly and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitask import MiniTask
from selftask.methods.byol import BYOL, regression_loss
from selftask.models.heads import ProjectorPredictor, mlp

SMALL: dict[str, Any] = {"out_dim": 5, "hidden_dim": 7, "momentum": 0.9}


class PlainBYOL(BYOL):
    """Without BatchNorm, whose statistics are those of one rank."""

    def build_head(self, embed_dim: int) -> nn.Module:
        dim, hidden_dim = self.config.out_dim, self.config.hidden_dim
        return ProjectorPredictor(
            mlp(embed_dim, hidden_dim, dim, norm=False), mlp(dim, hidden_dim, dim, norm=False)
        )


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _unit(row: Tensor) -> list[float]:
    length = math.sqrt(sum(x * x for x in row.tolist()))
    return [x / length for x in row.tolist()]


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 2, |q - z'|^2 of unit vectors, in both directions, as loops."""
    prediction, projection = _random(2, 4, 5), _random(2, 4, 5)
    total = 0.0
    for v in range(2):
        for i in range(4):
            pairs = zip(_unit(prediction[v, i]), _unit(projection[v, i]), strict=True)
            total += sum((q - z) ** 2 for q, z in pairs)
    loss = regression_loss(prediction, projection)
    assert loss.item() == pytest.approx(total / 4, rel=1e-12)


def test_loss_is_that_of_lightly() -> None:
    theirs = pytest.importorskip("lightly.loss").NegativeCosineSimilarity()
    prediction, projection = _random(2, 4, 5).float(), _random(2, 4, 5).float()
    expected = sum(2 + 2 * theirs(prediction[v], projection[v]) for v in range(2))
    assert regression_loss(prediction, projection).item() == pytest.approx(
        float(expected), rel=1e-5
    )


def test_loss_is_zero_for_the_same_and_eight_for_opposite_directions() -> None:
    rows = _random(2, 4, 5)
    assert regression_loss(rows, 3 * rows).item() == pytest.approx(0.0, abs=1e-12)
    assert regression_loss(rows, -rows).item() == pytest.approx(8.0)


def test_each_view_predicts_the_teacher_of_the_other() -> None:
    task = MiniTask(PlainBYOL, SMALL)
    views = [view[:8] for view in task.views]
    head, backbone = task.base_model.head, task.base_model.backbone
    prediction = torch.stack([head.predictor(head.projector(backbone(v))) for v in views])
    projection = torch.stack([task.loss.teacher([v])[0] for v in reversed(views)])
    expected = regression_loss(prediction, projection)
    assert task.run(1).losses == pytest.approx([expected.item()])


def _batch_normalized(x: Tensor) -> Tensor:
    return (x - x.mean(dim=0)) / (x.var(dim=0, correction=0) + 1e-5).sqrt()


def _mlp(layers: nn.Module, x: Tensor) -> Tensor:
    """The projector or predictor by its formula: BatchNorm over the rows given."""
    first, _, _, last = layers
    hidden = _batch_normalized(x @ first.weight.T + first.bias).clamp(min=0)
    return hidden @ last.weight.T


def test_batch_norm_sees_one_view_at_a_time() -> None:
    """The published code passes each view by itself through all three networks."""
    task = MiniTask("byol", SMALL)
    network, loss = task.base_model, 0.0
    views = [view[:8] + place for place, view in enumerate(task.views)]
    task.views = [view + place for place, view in enumerate(task.views)]
    project = [_mlp(network.head.projector, network.backbone(view)) for view in views]
    for place in range(2):
        prediction = _mlp(network.head.predictor, project[place])
        pairs = zip(prediction, project[1 - place], strict=True)  # the teacher is a copy yet
        loss += sum(
            (F.normalize(q, dim=0) - F.normalize(z, dim=0)).square().sum() for q, z in pairs
        )
    assert task.run(1).losses == pytest.approx([loss.item() / 8], rel=1e-9)


def test_predictor_is_trained_and_the_teacher_only_follows() -> None:
    """Eq. 1 with tau = 0.9 at the first step; the predictor has no teacher."""
    task = MiniTask("byol", SMALL)
    network = task.base_model
    teacher = [p.clone() for p in task.loss.teacher.parameters()]
    predictor = [p.clone() for p in network.head.predictor.parameters()]
    task.run(1)
    students = [*network.backbone.parameters(), *network.head.projector.parameters()]
    for old, new, student in zip(teacher, task.loss.teacher.parameters(), students, strict=True):
        assert torch.allclose(new, 0.9 * old + 0.1 * student, rtol=0, atol=1e-12)
        assert not new.requires_grad
    for old, new in zip(predictor, network.head.predictor.parameters(), strict=True):
        assert new.requires_grad
        assert not torch.equal(old, new)


def test_teacher_stands_still_in_the_end() -> None:
    """tau rises to 1 along a cosine: 1 - (1 - tau_base)(cos(pi k / K) + 1) / 2."""
    cosine = {"name": "cosine", "start": 0.996, "end": 1.0}
    momentum = MiniTask("byol", {**SMALL, "momentum": cosine}).loss.momentum_at
    for where in (0.0, 0.25, 0.5, 0.9):
        expected = 1 - (1 - 0.996) * (math.cos(math.pi * where) + 1) / 2
        assert momentum(where) == pytest.approx(expected, abs=1e-12)
