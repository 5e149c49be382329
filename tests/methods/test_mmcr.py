"""MMCR against the figures of its authors' code, singular values of torch, and its extremes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from figures import draw
from minitask import MiniTask, loss_of
from selftask.methods.mmcr import MMCR, global_norm, local_norm
from selftask.models.losses.polar import nuclear_norm, polar_factor

# ThomasYerxa/mmcr for seeds 0 and 500: loss and gradient; with lambda 0.05, 0 and a teacher
PLAIN = [(-4.140129380633392, 0.4360163039841747), (-3.819281109499742, 0.44141681005597466)]
NO_LOCAL = [(-4.332610943024427, 0.4359915130974815), (-4.013994651289027, 0.4418142758629466)]
TEACHER = [(-2.779203245277826, 0.2365141538717476), (-2.6973879417042412, 0.2284071679235209)]


@pytest.mark.parametrize(
    ("weight", "with_teacher", "figures"),
    [(0.05, False, PLAIN), (0.0, False, NO_LOCAL), (0.05, True, TEACHER)],
)
def test_loss_is_that_of_the_authors_code(
    weight: float, with_teacher: bool, figures: list[tuple[float, float]]
) -> None:
    method = MMCR(MMCR.Config(local_weight=weight))
    for seed, expected in zip((0, 500), figures, strict=True):
        output, teacher = (draw(seed + add, 10, 4, 12).transpose(0, 1) for add in (0, 1))
        output.requires_grad_()
        added: dict[str, Any] = {"teacher": teacher} if with_teacher else {}
        loss = loss_of(method, output, **added)
        (gradient,) = torch.autograd.grad(loss, output)
        assert (loss.item(), gradient.norm().item()) == pytest.approx(expected, rel=1e-9)


def paper(output: Tensor) -> Tensor:
    """Of eq. 3, one image after the other, from singular values."""
    images = [F.normalize(image, dim=1) for image in output.unbind(1)]
    means = torch.stack([image.mean(dim=0) for image in images])
    local = sum(torch.linalg.svdvals(image).sum() for image in images) / len(images)
    return 0.3 * local - torch.linalg.svdvals(means).sum()


@pytest.mark.parametrize("shape", [(3, 7, 5), (3, 5, 7)])
def test_loss_is_that_of_the_paper(shape: tuple[int, ...]) -> None:
    output = draw(3, *shape).requires_grad_()
    loss, expected = 0.3 * local_norm(output) - global_norm(output), paper(output)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    ours, theirs = (torch.autograd.grad(value, output)[0] for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_norm_is_largest_for_orthogonal_images_and_least_for_equal_ones() -> None:
    """N and the root of N for N images whose views agree."""
    views = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    assert global_norm(views).item() == pytest.approx(6.0, rel=1e-12)
    collapsed = draw(1, 6).expand(2, 6, 6)
    assert global_norm(collapsed).item() == pytest.approx(math.sqrt(6), rel=1e-12)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
def test_polar_factor_of_singular_values_far_apart(dtype: torch.dtype, precision: float) -> None:
    """Down to 1e-3 of the largest one; the norm is exact to rounding, zeros included."""
    left, right = (torch.linalg.qr(draw(seed, rows, 8))[0] for seed, rows in ((1, 20), (2, 8)))
    scales = torch.logspace(0, -3, 8, dtype=torch.float64)
    factor = polar_factor(((left * scales) @ right.T).to(dtype)).double()
    torch.testing.assert_close(factor, left @ right.T, rtol=0, atol=precision)
    scales[4:] = 0
    norm = nuclear_norm(((left * scales) @ right.T).to(dtype)).item()
    assert norm == pytest.approx(scales.sum().item(), rel=10 * torch.finfo(dtype).eps)
    assert polar_factor(torch.zeros(3, 2)).tolist() == [[0.0, 0.0]] * 3


def test_a_teacher_exists_and_follows_with_a_momentum_only() -> None:
    """The mean of two steps of 0.75, beside the network's own."""
    config = {"out_dim": 5, "hidden_dim": 7}
    assert MiniTask("mmcr", config).run(1).loss.teacher is None
    task = MiniTask("mmcr", {**config, "momentum": 0.75})
    network, teacher = (next(m.parameters()) for m in (task.base_model, task.loss.teacher))
    expected = network.detach().clone()
    for _ in range(2):
        task.run(1)
        expected = 0.75 * expected + 0.25 * network.detach()
        torch.testing.assert_close(teacher, expected, rtol=1e-12, atol=1e-14)
    assert not task.last_batch["teacher"].requires_grad
