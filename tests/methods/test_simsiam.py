"""SimSiam and FastSiam against the figures of their authors' code."""

from __future__ import annotations

import pytest
import torch

from figures import draw
from minitask import MiniTask
from selftask.methods.simsiam import similarity_loss

# facebookresearch/simsiam: loss, gradients of both predictions
SIMSIAM = (-0.03481145881271352, 0.026464709941265485, 0.02729081883246786)
# lightly's FastSiam for seeds 0 and 500: loss, gradient of the first prediction
FASTSIAM = [
    (-0.021628351592985186, 0.02999203055146911),
    (-0.037337923540218566, 0.031207256825329967),
]


def test_loss_is_that_of_the_authors_code() -> None:
    projection = torch.stack([draw(0, 16, 24), draw(1, 16, 24)])
    prediction = torch.stack([draw(2, 16, 24), draw(3, 16, 24)]).requires_grad_()
    loss = similarity_loss(prediction, projection)
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert (loss.item(), *gradient.norm(dim=(1, 2)).tolist()) == pytest.approx(SIMSIAM, rel=1e-9)


@pytest.mark.parametrize("case", [0, 1])
def test_more_views_are_fastsiam(case: int) -> None:
    seed = 500 * case
    prediction = torch.stack([draw(seed + 10 + view, 8, 8) for view in range(4)]).requires_grad_()
    projection = torch.stack([draw(seed + 20 + view, 8, 8) for view in range(4)])
    loss = similarity_loss(prediction, projection)
    (gradient,) = torch.autograd.grad(loss, prediction)
    computed = (loss.item(), gradient[0].norm().item())
    assert computed == pytest.approx(FASTSIAM[case], rel=1e-9)


def test_perfect_agreement_reaches_the_floor_and_projections_have_no_gradient() -> None:
    rows = draw(1, 8, 5).expand(3, -1, -1).clone().requires_grad_()
    prediction = (2 * rows).detach().requires_grad_()
    loss = similarity_loss(prediction, rows)
    assert loss.item() == pytest.approx(-1.0, abs=1e-12)
    assert torch.autograd.grad(loss, rows, allow_unused=True)[0] is None


def test_learning_rate_of_the_predictor_stays() -> None:
    """As its authors' --fix-pred-lr; all else follows the schedule."""
    for fixed in (True, False):
        (rule,) = MiniTask("simsiam", {"fix_predictor_lr": fixed}).loss.group_rules() or (None,)
        assert (rule is not None) == fixed
        if rule is not None:
            assert (rule.match, rule.schedule) == ("network.head.predictor", "constant")


@pytest.mark.parametrize(("width", "hidden"), [(None, 24), (40, 40)])
def test_width_of_the_projector_is_the_backbones_unless_set(width: int | None, hidden: int) -> None:
    """As in the authors' code; solo-learn has 2048 behind the 512 features of a ResNet-18."""
    options = {"projector_dim": width, "out_dim": 32, "hidden_dim": 8}
    head = MiniTask("simsiam", options).loss.build_head(24)
    sizes = [tuple(p.shape) for p in head.projector.parameters() if p.dim() > 1]
    assert sizes == [(hidden, 24), (hidden, hidden), (32, hidden)]
