"""ReSSL against its authors' figures over two steps, and as loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask
from selftask.methods.ressl import ReSSL
from selftask.models.feature_queue import FeatureQueue
from selftask.models.losses.relations import relation_cross_entropy

SMALL: dict[str, Any] = {"out_dim": 5, "hidden_dim": 7, "queue_size": 16, "momentum": 0.9}

# KyleZheng1997/ReSSL for seeds 0 and 500, two steps each: with one strong view and with two the
# loss and the gradient of each view, and the sum of the queue afterwards
STEPS = [
    [
        (
            (4.928847494886015, 0.8761266704441868),
            (5.364231280335413, 0.4380633352220934, 0.4337319165977882),
            -5.715316584721455,
        ),
        (
            (6.280463713128733, 0.853914997497437),
            (6.3566557067292955, 0.4269574987487185, 0.4320984699594281),
            -0.9555489638726895,
        ),
    ],
    [
        (
            (6.102577404673248, 0.9125222785742696),
            (6.434785112086706, 0.4562611392871348, 0.42595890344246756),
            -4.2774172730332465,
        ),
        (
            (5.216895852872961, 0.8524560760255495),
            (5.911064749691862, 0.42622803801277476, 0.492548194707748),
            -3.7084165423941857,
        ),
    ],
]


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_are_those_of_the_authors(case: int) -> None:
    seed = 500 * case
    queue = FeatureQueue(32, 16).double()
    queue.rows.copy_(F.normalize(draw(seed + 90, 16, 32), dim=0).T)
    for step, (single, multi, total) in enumerate(STEPS[case]):
        start = seed + 100 * step
        keys = F.normalize(draw(start + 1, 8, 16), dim=1)
        for seeds, figures in (((start,), single), ((start, start + 2), multi)):
            query = torch.stack([draw(one, 8, 16) for one in seeds]).requires_grad_()
            loss = relation_cross_entropy(
                query, keys, queue.rows, temperature=0.1, target_temperature=0.04
            )
            (gradient,) = torch.autograd.grad(loss, query)
            computed = (loss.item(), *gradient.norm(dim=(1, 2)).tolist())
            assert computed == pytest.approx(figures, rel=1e-9)
        queue.update(keys)
        assert queue.rows.sum().item() == pytest.approx(total, rel=1e-9)


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 5 to 7 as loops."""
    query, target = draw(1, 2, 3, 5), F.normalize(draw(2, 3, 5), dim=1)
    candidates = F.normalize(draw(3, 4, 5), dim=1)
    total = 0.0
    for view in query:
        for student, teacher in zip(view, target, strict=True):
            goals = [math.exp(float(teacher @ other) / 0.05) for other in candidates]
            scores = [float(student @ other / student.norm()) / 0.2 for other in candidates]
            log_sum = math.log(sum(map(math.exp, scores)))
            pairs = zip(goals, scores, strict=True)
            total += sum(goal * (log_sum - score) for goal, score in pairs) / sum(goals) / 6
    loss = relation_cross_entropy(
        query, target, candidates, temperature=0.2, target_temperature=0.05
    )
    assert loss.item() == pytest.approx(total, rel=1e-12)


def test_no_gradient_reaches_the_teacher_and_agreement_is_the_floor() -> None:
    query, target = draw(1, 1, 3, 5).requires_grad_(), draw(2, 3, 5).requires_grad_()
    candidates = F.normalize(draw(3, 4, 5), dim=1).requires_grad_()
    settings = {"temperature": 0.2, "target_temperature": 0.2}
    loss = relation_cross_entropy(query, target, candidates, **settings)
    gradients = torch.autograd.grad(loss, (query, target, candidates), allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [True, False, False]
    equal = target.detach()[None].requires_grad_()
    floor = relation_cross_entropy(equal, target, candidates, **settings)
    (gradient,) = torch.autograd.grad(floor, equal)
    assert floor < loss and torch.allclose(gradient, torch.zeros_like(gradient), atol=1e-12)


def test_the_teacher_sees_the_first_view_and_the_network_all_others() -> None:
    task = MiniTask("ressl", SMALL, sizes=(8, 8, 8))
    before = task.loss.queue.rows.clone()
    output = task.base_model([view[:8] for view in task.views[1:]])
    keys = F.normalize(task.loss.teacher([task.views[0][:8]])[0], dim=1)
    loss = relation_cross_entropy(output, keys, before, temperature=0.1, target_temperature=0.04)
    assert task.run(1).losses == pytest.approx([loss.item()])
    assert torch.allclose(task.loss.queue.rows[:8], keys, rtol=1e-12)
    assert torch.equal(task.loss.queue.rows[8:], before[8:])


def test_chance_is_the_loss_of_equal_similarities() -> None:
    same = F.normalize(torch.ones(16, 5, dtype=torch.float64), dim=1)
    loss = relation_cross_entropy(
        draw(1, 1, 3, 5), draw(2, 3, 5), same, temperature=0.1, target_temperature=0.04
    )
    assert ReSSL(ReSSL.Config(**SMALL)).chance_loss == pytest.approx(loss.item())
