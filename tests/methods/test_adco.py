"""AdCo against its authors' figures over two steps and as loops; its negatives over a run."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask, largest_difference
from ranks import run_ranks
from selftask.methods.adco import AdCo, adversarial_loss

SMALL: dict[str, Any] = {"out_dim": 5, "hidden_dim": 7, "num_negatives": 9, "momentum": 0.9}

# maple-research-lab/AdCo for seeds 0 and 500, with one query and with two, two steps each: loss,
# gradient of the first query, norm and sum of the negatives afterwards, norm of their momentum
STEPS = [
    [
        [
            5.114799163755951,
            1.055653288639424,
            15.679717161537292,
            9.82837309259447,
            2.3459448503659615,
        ],
        [
            6.011099153583522,
            0.9238485203611013,
            20.37194406563179,
            -3.0962057212473537,
            2.98626778052205,
        ],
    ],
    [
        [
            5.038010718172429,
            0.527826644319712,
            14.97134265493927,
            6.909106186648676,
            1.7581140714610501,
        ],
        [
            6.1627835575616725,
            0.4625936310481534,
            17.97616210950579,
            -1.9069768813764885,
            2.3373354078000417,
        ],
    ],
    [
        [
            6.016712241557384,
            1.0257704382231387,
            14.870103968894176,
            -23.043480578837663,
            1.7669236442143308,
        ],
        [
            6.051322880220295,
            0.9470970868848864,
            19.800002230757393,
            -35.35261087804744,
            3.660302843907385,
        ],
    ],
    [
        [
            6.039654942724003,
            0.5128852191115694,
            14.937843132835111,
            -15.05740182764303,
            1.8293088523574388,
        ],
        [
            6.105586751695875,
            0.481182854364055,
            18.37176350639055,
            -17.84143021315888,
            2.590785091536215,
        ],
    ],
]


@pytest.mark.parametrize("case", range(4))
def test_two_steps_are_those_of_the_authors(case: int) -> None:
    seed, symmetric = 500 * (case // 2), case % 2 == 1
    method = AdCo(AdCo.Config(out_dim=12, num_negatives=16, symmetric=symmetric)).double()
    method.negatives.copy_(draw(seed + 90, 12, 16).T)
    for step, figures in enumerate(STEPS[case]):
        start = seed + 100 * step
        views = F.normalize(torch.stack([draw(start, 8, 12), draw(start + 1, 8, 12)]), dim=2)
        keys = views.flip(0)[: method.num_queries]
        query = torch.stack([draw(start, 8, 12), draw(start + 1, 8, 12)])[: method.num_queries]
        query.requires_grad_()
        loss = adversarial_loss(query, keys, method.negatives, temperature=0.12)
        (gradient,) = torch.autograd.grad(loss, query)
        method.step_negatives([(query.detach(), keys)])
        norms = method.negatives.norm(), method.negatives.sum(), method.velocity.norm()
        computed = [loss.item(), gradient[0].norm().item(), *(x.item() for x in norms)]
        assert computed == pytest.approx(figures, rel=1e-8)


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 2 as loops, with the keys of the batch among the negatives."""
    query, key, negatives = draw(1, 1, 3, 5), F.normalize(draw(2, 1, 3, 5), dim=2), draw(3, 4, 5)
    total = 0.0
    for i in range(3):
        scores = [
            float(query[0, i] @ other / query[0, i].norm() / other.norm()) / 0.3
            for other in (*key[0], *negatives)
        ]
        total += (math.log(sum(map(math.exp, scores))) - scores[i]) / 3
    loss = adversarial_loss(query, key, negatives, temperature=0.3)
    assert loss.item() == pytest.approx(total, rel=1e-12)


def test_the_negatives_climb_the_loss_that_the_network_descends() -> None:
    """A small step in their direction makes the loss larger; the network gets no part of it."""
    method = AdCo(AdCo.Config(**SMALL, negative_lr=1e-3, negative_weight_decay=0.0)).double()
    query, keys = draw(1, 1, 4, 5), F.normalize(draw(2, 1, 4, 5), dim=2)
    losses = []
    for _ in range(5):
        loss = adversarial_loss(query, keys, method.negatives, temperature=0.02)
        losses.append(loss.item())
        method.step_negatives([(query, keys)])
    assert losses == sorted(losses) and losses[0] < losses[-1]
    assert not list(method.parameters())


def test_the_negatives_move_by_the_queries_and_keys_of_the_step() -> None:
    task = MiniTask("adco", SMALL).run(1)
    expected = copy.deepcopy(task.loss)
    batch = task.run(1).last_batch
    expected.step_negatives([(batch.output.detach(), batch["keys"])])
    torch.testing.assert_close(task.loss.negatives, expected.negatives, rtol=1e-12, atol=0)


def test_two_ranks_and_accumulated_batches_are_one() -> None:
    alone = _two_updates(0)
    for state in run_ranks(_two_updates, 2):
        assert largest_difference(state, alone) < 1e-9
    task = MiniTask("adco", SMALL, accumulate=2, epochs=3).run(1)
    assert not task.loss.pending
    assert task.loss.velocity.norm() > 0


def _two_updates(rank: int) -> dict[str, Any]:
    return MiniTask("adco", {**SMALL, "symmetric": True}).run(2).state()


def test_chance_is_the_loss_of_equal_similarities() -> None:
    method: AdCo = MiniTask("adco", SMALL, batch_size=4).loss
    same = torch.ones(1, 4, 5, dtype=torch.float64)
    loss = adversarial_loss(
        draw(1, 1, 4, 5), F.normalize(same, dim=2), same[0, :1].expand(9, 5), temperature=0.12
    )
    assert loss.item() == pytest.approx(method.chance_loss)
