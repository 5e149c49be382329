"""TiCo against lightly's figures over two steps, and its covariance over a run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask
from selftask.methods.tico import TiCo, second_moments, tico_terms

# lightly for seeds 0 and 500, two steps each: loss, norm of C, gradients of student and teacher
STEPS = [
    [
        (1.1071301177103168, 0.040612002632119504, 0.09298699459944337, 0.0935971620881913),
        (1.4269014916017626, 0.06951278778435979, 0.09346810438557461, 0.09345965904233917),
    ],
    [
        (1.2080889830563826, 0.04118220343914666, 0.08942122597243739, 0.08616068100034087),
        (1.269765816428571, 0.07080135065621541, 0.09722000946472557, 0.09980429826721195),
    ],
]


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_are_those_of_lightly(case: int) -> None:
    covariance = torch.zeros(10, 10, dtype=torch.float64)
    for step, figures in enumerate(STEPS[case]):
        seed = 500 * case + 10 * step
        student, teacher = (draw(seed + view, 12, 10).requires_grad_() for view in (0, 1))
        units = F.normalize(student.detach(), dim=1)
        covariance = 0.9 * covariance + 0.1 * units.T @ units / 12
        invariance, contrast = tico_terms(student, teacher, covariance)
        loss = invariance + 8 * contrast
        gradients = torch.autograd.grad(loss, (student, teacher))
        norms = [gradient.norm().item() for gradient in gradients]
        computed = (loss.item(), covariance.norm().item(), *norms)
        assert computed == pytest.approx(figures, rel=1e-9)


def test_covariance_is_averaged_over_steps() -> None:
    """As a loop over what the network gave, with the share of the batch before it is used."""
    config = {"out_dim": 5, "hidden_dim": 7, "covariance_momentum": 0.75}
    task = MiniTask("tico", config)
    method: TiCo = task.loss
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for _ in range(3):
        task.run(1)
        batch = task.last_batch
        units = [row / row.norm() for row in batch.output[0].detach()]
        products = sum(torch.outer(unit, unit) for unit in units) / len(units)
        expected = 0.75 * expected + 0.25 * products
        assert torch.allclose(batch["covariance"], expected, rtol=1e-12)
        assert torch.allclose(method.covariance, expected, rtol=1e-12)
        invariance, contrast = tico_terms(batch.output[0], batch["teacher"], expected)
        terms = [batch.terms[name].item() for name in ("invariance", "contrast")]
        assert terms == pytest.approx([invariance.item(), 8 * contrast.item()], rel=1e-9)
    assert "covariance" in method.state_dict()


def test_second_moments_are_not_rounded_under_autocast() -> None:
    rows = draw(0, 12, 10).float()
    expected = second_moments(rows.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(second_moments(rows).double(), expected, rtol=1e-5, atol=1e-7)
