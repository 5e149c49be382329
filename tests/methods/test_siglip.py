"""SigLIP against the figures of open_clip, its loss as loops, and itself on two ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from figures import draw
from ranks import run_ranks
from selftask.methods.siglip import SigLIP, judge_pairs

# mlfoundations/open_clip, src/open_clip/loss.py:SigLipLoss, whole and in chunks: loss, and
# gradients of images, captions, scale and bias, for two sets of inputs
FIGURES = {
    0: {
        "loss": 9.6075250992931,
        "images": 0.7702338477410905,
        "captions": 0.7523299246377727,
        "scale": 0.03619377537396226,
        "bias": 0.9923900742942227,
    },
    500: {
        "loss": 10.099300196987036,
        "images": 0.7058642241391341,
        "captions": 0.7270375143278013,
        "scale": 0.013454976210471252,
        "bias": 0.9906781020082454,
    },
}


def _scalars() -> tuple[Tensor, Tensor]:
    scale = torch.tensor(math.log(10.0), dtype=torch.float64, requires_grad=True)
    return scale, torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("seed", FIGURES)
def test_loss_and_gradients_are_those_of_the_published_code(seed: int) -> None:
    images, captions = draw(seed, 12, 16).requires_grad_(), draw(seed + 1, 12, 16).requires_grad_()
    log_scale, bias = _scalars()
    loss = judge_pairs(images, captions, log_scale, bias)
    loss.backward()
    assert images.grad is not None and captions.grad is not None
    assert log_scale.grad is not None and bias.grad is not None
    figures = {
        "loss": loss.item(),
        "images": images.grad.norm().item(),
        "captions": captions.grad.norm().item(),
        "scale": log_scale.grad.abs().item() / 10,  # of the scale, not of its logarithm
        "bias": bias.grad.abs().item(),
    }
    assert figures == pytest.approx(FIGURES[seed], rel=1e-9)


def test_loss_is_that_of_the_paper() -> None:
    """Algorithm 1 as loops over pairs."""
    images, captions, expected = draw(3, 5, 7), draw(4, 5, 7), 0.0
    for i in range(5):
        for j in range(5):
            a, b = images[i], captions[j]
            logit = 4.0 * float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)) - 1.5
            sign = 1 if i == j else -1
            expected += math.log(1 + math.exp(-sign * logit)) / 5
    scalars = torch.tensor(math.log(4.0)).double(), torch.tensor(-1.5).double()
    assert judge_pairs(images, captions, *scalars).item() == pytest.approx(expected, rel=1e-7)


def test_agreement_reaches_zero_and_equal_logits_the_loss_at_chance() -> None:
    method = SigLIP(SigLIP.Config())
    method.batch_size = 8
    images = torch.eye(8).double()
    sharp = torch.tensor(math.log(200.0)).double(), torch.tensor(-100.0).double()
    assert judge_pairs(images, images, *sharp).item() < 1e-12
    same = torch.ones(8, 8).double()
    best = torch.tensor(-math.log(7.0)).double() - 1.0  # sigmoid of the logits is 1 / 8
    assert method.chance_loss == pytest.approx(
        judge_pairs(same, same, torch.zeros(()).double(), best).item(), rel=1e-12
    )
    assert method.bias.item() == -10 and method.log_scale.exp().item() == pytest.approx(10)


def test_the_scale_has_no_limit() -> None:
    """CLIP's is 100."""
    method = SigLIP(SigLIP.Config(temperature=0.002))
    method.on_update(None)  # type: ignore[arg-type]
    assert method.log_scale.exp().item() == pytest.approx(500)


def _of_rank(rank: int, num_ranks: int) -> tuple[Tensor, list[Tensor]]:
    """This rank's loss, and gradients of the mean over ranks."""
    features = [draw(seed, 8, 6).chunk(num_ranks)[rank].requires_grad_() for seed in (0, 1)]
    scalars = _scalars()
    loss = judge_pairs(features[0], features[1], *scalars)
    loss.backward()
    return loss.detach(), [x.grad / num_ranks for x in (*features, *scalars) if x.grad is not None]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_have_the_loss_and_gradients_of_one(num_ranks: int) -> None:
    loss, gradients = _of_rank(0, 1)
    of_ranks = run_ranks(_of_rank, num_ranks, num_ranks)
    torch.testing.assert_close(sum(x for x, _ in of_ranks) / num_ranks, loss)
    for number, expected in enumerate(gradients):
        parts = [of_rank[number] for _, of_rank in of_ranks]
        whole = sum(parts) if expected.dim() == 0 else torch.cat(parts)
        torch.testing.assert_close(whole, expected)
