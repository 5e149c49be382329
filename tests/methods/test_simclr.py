"""SimCLR against its paper, lightly and itself on two ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from minitask import MiniTask, largest_difference, loss_of
from ranks import run_ranks
from selftask.methods.simclr import SimCLR, info_nce


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 1 and algorithm 1, as loops over the 2N views."""
    tau, num = 0.3, 4
    first, second = _random(num, 5), _random(num, 5)
    z = [*first, *second]
    total = 0.0
    for i in range(2 * num):
        j = (i + num) % (2 * num)  # the other view of the same image
        others = sum(math.exp(_cosine(z[i], z[k]) / tau) for k in range(2 * num) if k != i)
        total -= math.log(math.exp(_cosine(z[i], z[j]) / tau) / others)
    loss = info_nce(first, second, temperature=tau)
    assert loss.item() == pytest.approx(total / (2 * num), rel=1e-12)


def test_more_views_are_compared_in_pairs() -> None:
    """Each pair among all views of other images, as loops."""
    tau, num, count = 0.3, 4, 3
    views = [_random(num, 5) for _ in range(count)]
    total = 0.0
    for a in range(count):
        for b in range(count):
            for i in range(num if a != b else 0):
                positive = math.exp(_cosine(views[a][i], views[b][i]) / tau)
                negatives = sum(
                    math.exp(_cosine(views[a][i], views[c][k]) / tau)
                    for c in range(count)
                    for k in range(num)
                    if k != i
                )
                total -= math.log(positive / (positive + negatives))
    loss = info_nce(*views, temperature=tau)
    assert loss.item() == pytest.approx(total / (num * count * (count - 1)), rel=1e-12)
    method = MiniTask("simclr", {}, batch_size=num, sizes=(8, 8, 4)).loss
    assert method.chance_loss == pytest.approx(
        loss_of(method, torch.ones(count, num, 5, dtype=torch.float64)).item()
    )


def test_loss_is_that_of_lightly() -> None:
    """And its gradients, which flow through both sides of a similarity."""
    theirs = pytest.importorskip("lightly.loss").NTXentLoss(temperature=0.3)
    views = [_random(6, 5).float().requires_grad_() for _ in range(2)]
    ours, expected = info_nce(*views, temperature=0.3), theirs(*views)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
    for actual, wanted in zip(
        torch.autograd.grad(ours, views), torch.autograd.grad(expected, views), strict=True
    ):
        assert torch.allclose(actual, wanted, rtol=1e-4, atol=1e-6)


def test_an_image_is_never_its_own_negative() -> None:
    """Perfect alignment and tau -> 0: the loss goes to 0."""
    rows = _random(8, 5)
    assert info_nce(rows, 2 * rows, temperature=1e-4).item() == pytest.approx(0.0, abs=1e-12)


def test_chance_is_the_loss_of_equal_embeddings() -> None:
    method = MiniTask("simclr", {}, batch_size=8).loss
    loss = loss_of(method, torch.ones(2, 8, 5, dtype=torch.float64))
    assert method.chance_loss == pytest.approx(loss.item())


def test_the_loss_is_not_rounded_under_autocast() -> None:
    first, second = _random(8, 64).float(), _random(8, 64).float()
    expected = info_nce(first, second, temperature=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(info_nce(first, second, temperature=0.05), expected)


def test_head_is_that_of_the_papers_code_or_bare() -> None:
    kinds = [type(layer) for layer in SimCLR(SimCLR.Config()).build_head(6)]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d]
    head = SimCLR(SimCLR.Config()).build_head(6)
    assert not head[-1].bias.any() and not head[-1].bias.requires_grad  # center=False there
    bare = SimCLR(SimCLR.Config(norm=False, hidden_dim=7, out_dim=3)).build_head(6)
    assert [type(layer) for layer in bare] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [tuple(p.shape) for p in bare.parameters()] == [(7, 6), (7,), (3, 7), (3,)]


def test_scale_multiplies_the_loss_and_its_chance() -> None:
    """2 is the sum of both directions: tf2/objective.py adds loss_a and loss_b."""
    one, two = (MiniTask("simclr", {"scale": scale}).loss for scale in (1.0, 2.0))
    output = _random(2, 8, 5)
    assert loss_of(two, output).item() == 2 * loss_of(one, output).item()
    assert two.chance_loss == 2 * one.chance_loss


def test_three_views_on_two_ranks() -> None:
    """Gradients reach the negatives on other ranks, of each view."""
    alone = _four_updates(0)
    for one in run_ranks(_four_updates, 2):
        assert largest_difference(one["state"], alone["state"]) < 1e-9
        assert one["chance"] == alone["chance"]


def _four_updates(rank: int) -> dict[str, Any]:
    task = MiniTask("simclr", {"out_dim": 5, "norm": False}, sizes=(8, 8, 4)).run(4)
    return {"state": task.state(), "chance": task.loss.chance_loss}


def test_a_run_with_smaller_views(tmp_path: Path) -> None:
    """Two views and two of half the size: each of the four is compared with each other one."""
    small = "views.small={count: 2, transforms: [{name: resize, size: 16}, normalize]}"
    trained = tiny.train("simclr", tmp_path, "run", small, "train.epochs=1")
    shapes = [
        tuple(view.shape[2:]) for views in trained.last_batch.views.values() for view in views
    ]
    assert shapes == [(32, 32)] * 2 + [(16, 16)] * 2
    output = trained.last_batch.output.detach()
    assert output.shape[:2] == (4, tiny.BATCH_SIZE)
    expected = info_nce(*output, temperature=trained.loss.config.temperature)
    row = tiny.rows(trained.out)[-1]
    trained.close()
    assert row["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert trained.loss.chance_loss == pytest.approx(math.log(1 + 4 * (tiny.BATCH_SIZE - 1)))
