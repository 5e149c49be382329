"""CLSA against its authors' figures over two steps, as loops, and on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask
from selftask.batch import Batch, total
from selftask.methods.clsa import CLSA

SMALL: dict[str, Any] = {"out_dim": 5, "hidden_dim": 7, "queue_size": 16, "momentum": 0.9}

# maple-research-lab/CLSA for seeds 0 and 500, two steps each: terms of the loss, gradients of the
# query and of both strong views, sum of the queue afterwards
STEPS = [
    [
        (
            (3.943089413933448, 8.443357551145114),
            (0.5841337052185356, 0.29827820464155025, 0.31847665292793315),
            -2.5510188861953975,
        ),
        (
            (4.415706622210369, 7.631404939043826),
            (0.5638883671019655, 0.30391439267195636, 0.2785280475050429),
            -0.13078695792575978,
        ),
    ],
    [
        (
            (4.482642209263965, 7.932816781507425),
            (0.5655246986154124, 0.2692625864699859, 0.29897252806204044),
            -4.01457557043327,
        ),
        (
            (4.414400080092303, 8.649453431354253),
            (0.5275093956939311, 0.2440667242842638, 0.26684126050531914),
            -2.6672156544271646,
        ),
    ],
]


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_are_those_of_the_authors(case: int) -> None:
    seed = 500 * case
    method = CLSA(CLSA.Config(out_dim=12, queue_size=16)).double()
    method.queue.rows.copy_(F.normalize(draw(seed + 90, 12, 16), dim=0).T)
    for step, (terms, gradients, queue) in enumerate(STEPS[case]):
        start = seed + 100 * step
        keys = F.normalize(draw(start + 1, 8, 12), dim=1)
        output = torch.stack([draw(start + i, 8, 12) for i in (0, 2, 3)]).requires_grad_()
        computed = _terms(method, output, keys)
        assert [term.item() for term in computed.values()] == pytest.approx(terms, rel=1e-9)
        (gradient,) = torch.autograd.grad(total(computed), output)
        assert gradient.norm(dim=(1, 2)).tolist() == pytest.approx(gradients, rel=1e-9)
        method.queue.update(keys)
        assert method.queue.rows.sum().item() == pytest.approx(queue, rel=1e-9)


def _terms(method: CLSA, output: torch.Tensor, keys: torch.Tensor) -> dict[str, torch.Tensor]:
    none = torch.empty(0, dtype=torch.int64)
    batch = Batch(views={}, labels=none, index=none, key=none, output=output, added={"keys": keys})
    return method(output, batch)


def test_loss_is_that_of_the_paper() -> None:
    """As loops: a query among the keys of the batch and the queue, and a strong view after it."""
    config = CLSA.Config(out_dim=5, queue_size=6, temperature=0.3, strong_temperature=0.4)
    method = CLSA(config).double()
    output, keys = draw(1, 2, 3, 5), F.normalize(draw(2, 3, 5), dim=1)
    candidates = [*keys, *method.queue.rows]
    contrast = strong = 0.0
    for i in range(3):
        weak, hard = (
            [float(view[i] @ other / view[i].norm()) for other in candidates] for view in output
        )
        contrast += (math.log(sum(math.exp(x / 0.3) for x in weak)) - weak[i] / 0.3) / 3
        masses = [math.exp(x / 0.4) for x in weak]
        log_sum = math.log(sum(math.exp(x / 0.4) for x in hard))
        terms = [mass * (log_sum - x / 0.4) for mass, x in zip(masses, hard, strict=True)]
        strong += sum(terms) / sum(masses) / 3
    computed = {name: term.item() for name, term in _terms(method, output, keys).items()}
    assert computed == pytest.approx({"weak": contrast, "strong": strong}, rel=1e-12)


def test_the_weak_view_learns_nothing_from_strong_ones() -> None:
    method = CLSA(CLSA.Config(out_dim=5, queue_size=6)).double()
    output = draw(1, 3, 3, 5).requires_grad_()
    terms = _terms(method, output, F.normalize(draw(2, 3, 5), dim=1))
    gradients = [torch.autograd.grad(term, output)[0].norm(dim=(1, 2)) for term in terms.values()]
    assert [(gradient > 0).tolist() for gradient in gradients] == [
        [True, False, False],
        [False, True, True],
    ]


def test_chance_is_the_loss_of_equal_similarities() -> None:
    method: CLSA = MiniTask("clsa", SMALL, sizes=(8, 8, 8, 8), batch_size=4).loss
    method.queue.rows.copy_(F.normalize(torch.ones(16, 5, dtype=torch.float64), dim=1))
    loss = total(_terms(method, draw(1, 3, 4, 5), method.queue.rows[:4]))
    assert loss.item() == pytest.approx(method.chance_loss)
