"""VIbCReg and IterNorm against the figures of the authors' code, and correlations of torch."""

from __future__ import annotations

import pytest
import torch

from figures import draw
from minitask import loss_of
from ranks import run_ranks
from selftask.config.load import load_config
from selftask.distributed.collectives import rank, world_size
from selftask.errors import ConfigError
from selftask.methods.vibcreg import (
    IterNorm,
    VIbCReg,
    newton_inverse_root,
    variance_correlation,
)
from selftask.task.second_pass import second_pass

# ML4ITS/vibcreg for seeds 0 and 500: covariance, variance; of solo-learn: loss, gradients
TERMS = [
    (0.058852638483343225, 0.06288257392656586),
    (0.05026165743327833, 0.03942131619404869),
]
LOSS = [
    (46.885344867721614, 4.06494312388796, 4.520722337994265),
    (45.380388138377896, 4.414673158088611, 4.632531448125595),
]
# norm, largest covariance of two features, gradient; running mean, whitening and output by these
ITER_NORM = [
    (15.759000916162755, 0.029420940219247453, 19.015420822724536),
    (15.798920602257393, 0.042541811102607865, 16.05423301029707),
]
RUNNING = [
    (0.07413591014087424, 2.9371251986413314, 14.85663325804405),
    (0.08941223373306735, 2.909139560599037, 16.07790753620655),
]


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors_code(case: int) -> None:
    first = draw(500 * case, 32, 8)
    views = torch.stack([first, 0.5 * first + draw(500 * case + 1, 32, 8)]).requires_grad_()
    variance, covariance = variance_correlation(views)
    assert (covariance.item(), variance.item()) == pytest.approx(TERMS[case], rel=1e-9)
    loss = loss_of(VIbCReg(VIbCReg.Config()), views)
    (gradient,) = torch.autograd.grad(loss, views)
    computed = (loss.item(), *gradient.norm(dim=(1, 2)).tolist())
    assert computed == pytest.approx(LOSS[case], rel=1e-9)


@pytest.mark.parametrize("case", [0, 1])
def test_iter_norm_is_that_of_the_authors_code(case: int) -> None:
    """Two batches in training, one in evaluation mode."""
    seed, norm = 500 * case, IterNorm(8, 8).double()
    x = draw(seed + 2, 32, 8).requires_grad_()
    out = norm(x)
    (gradient,) = torch.autograd.grad((out * draw(seed + 3, 32, 8)).sum(), x)
    covariance = torch.cov(out.T, correction=0)
    largest = (covariance - covariance.diagonal().diag()).abs().max()
    computed = (out.norm().item(), largest.item(), gradient.norm().item())
    assert computed == pytest.approx(ITER_NORM[case], rel=1e-9)
    norm(draw(seed + 4, 32, 8))
    evaluated = norm.eval()(draw(seed + 5, 32, 8))
    tensors = (norm.running_mean, norm.running_whitening, evaluated)
    assert [t.norm().item() for t in tensors] == pytest.approx(RUNNING[case], rel=1e-9)


@pytest.mark.parametrize("rows", [5, 30])
def test_terms_are_those_of_torch(rows: int) -> None:
    """With more and fewer images than features; and with gradients."""
    views = (0.5 * draw(1, 2, rows, 6)).requires_grad_()
    expected = [torch.zeros(()).double(), torch.zeros(()).double()]
    for view in views:
        expected[0] = expected[0] + (1 - (view.var(dim=0) + 1e-4).sqrt()).relu().mean()
        matrix = torch.corrcoef(view.T)
        expected[1] = expected[1] + (matrix.square().sum() - 6) / 36
    for ours, theirs in zip(variance_correlation(views), expected, strict=True):
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
        gradients = (torch.autograd.grad(t, views, retain_graph=True)[0] for t in (ours, theirs))
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_iterations_approach_the_inverse_root_in_each_group() -> None:
    rows = draw(1, 40, 5)
    covariance = rows.T @ rows / 40
    root = newton_inverse_root(covariance, 30)
    eye = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(root @ (covariance + 1e-5 * eye) @ root, eye, rtol=0, atol=1e-9)
    groups = IterNorm(6, 2).double()
    x = draw(2, 20, 6)
    parts = [IterNorm(2, 2).double()(part) for part in x.split(2, dim=1)]
    torch.testing.assert_close(groups(x), torch.cat(parts, dim=1), rtol=1e-12, atol=1e-12)


def on_rank(_: int) -> list[torch.Tensor]:
    """Output, gradient and averages of IterNorm for a part of the images."""
    norm = IterNorm(6, 3).double()
    x = draw(3, 8, 6).chunk(world_size())[rank()].clone().requires_grad_()
    out = norm(x)
    (out * draw(4, 8, 6).chunk(world_size())[rank()]).sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, norm.running_mean, norm.running_whitening]


def test_iter_norm_on_two_ranks_is_that_of_one() -> None:
    (out, gradient, *averages), ranks = on_rank(0), run_ranks(on_rank, 2)
    for number, expected in enumerate((out, gradient)):
        parts = torch.cat([results[number] for results in ranks])
        torch.testing.assert_close(parts, expected, rtol=1e-10, atol=1e-12)
    for results in ranks:
        torch.testing.assert_close(results[2:], averages, rtol=1e-10, atol=1e-12)


def test_a_second_pass_in_a_step_does_not_move_the_averages() -> None:
    norm, features = IterNorm(6, 3).double(), draw(1, 8, 6)
    norm(features)
    averages = [norm.running_mean.clone(), norm.running_whitening.clone()]
    with second_pass(norm):
        norm(2 * features)
    torch.testing.assert_close(
        [norm.running_mean, norm.running_whitening], averages, rtol=0, atol=0
    )


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.group_width: 100 features .* groups of 64"):
        load_config("vibcreg", ["method.out_dim=100", "method.group_width=64"])
