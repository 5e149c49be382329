"""VISReg against lightly's figures, and the distribution that it asks for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask, loss_of
from selftask.methods.visreg import VISReg, gaussian_terms

# lightly for seeds 0 and 500: prediction, scale, shape, center without weights; loss, gradient.
# Its quantiles are float32: 1e-7.
TERMS = [
    (0.9157657305071149, 0.049654343056108795, 0.10777180818449868, 0.08336588935477134),
    (0.9557762325969078, 0.04182148964695091, 0.1075682458100325, 0.08322567209042883),
]
LOSS = [(0.3082894095865524, 0.03871968761072135), (0.3049314900523618, 0.040225299498485224)]


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_lightly(case: int) -> None:
    """Two global and two local views, 64 slices."""
    seed = 500 * case
    output = draw(seed + 2, 4, 12, 10).requires_grad_()
    slices = F.normalize(draw(seed, 10, 64), dim=0)
    method = VISReg(VISReg.Config())
    loss = loss_of(method, output, slices=slices)
    (gradient,) = torch.autograd.grad(loss, output)
    assert (loss.item(), gradient.norm().item()) == pytest.approx(LOSS[case], rel=1e-7)
    prediction = (output - output[:2].mean(dim=0)).square().mean()
    terms = gaussian_terms(output, slices)
    computed = [prediction.item(), *(terms[name].item() for name in ("scale", "shape", "center"))]
    assert computed == pytest.approx(TERMS[case], rel=1e-7)
    assert computed[1::2] == pytest.approx(TERMS[case][1::2], rel=1e-12)


def test_terms_vanish_for_normal_quantiles_and_see_scale_shape_and_center() -> None:
    """One feature of quantiles i / (n + 1), whose deviation nears 1; then changed one by one."""
    numbers = torch.arange(1, 20_000, dtype=torch.float64) / 20_000
    normal = torch.special.ndtri(numbers)[None, :, None]
    slices = torch.ones(1, 1, dtype=torch.float64)

    def terms(rows: torch.Tensor) -> dict[str, float]:
        return {name: term.item() for name, term in gaussian_terms(rows, slices).items()}

    zero = {"scale": 0.0, "shape": 0.0, "center": 0.0}
    assert terms(normal) == pytest.approx(zero, abs=1e-6)
    scale = (3 * normal.std(correction=0).item() - 1) ** 2
    assert terms(3 * normal) == pytest.approx({**zero, "scale": scale}, abs=1e-6)
    assert terms(normal + 2) == pytest.approx({**zero, "center": 4.0}, abs=1e-6)
    two_points = normal.sign()  # distance 2 - 2 E|x|
    assert terms(two_points)["shape"] == pytest.approx(2 - 2 * (2 / torch.pi) ** 0.5, abs=1e-3)


def test_a_collapsed_batch_has_a_gradient() -> None:
    """The loss of equal images is finite, and noise of any size is made larger."""
    output = (1e-3 * draw(1, 2, 8, 3)).requires_grad_()
    terms = gaussian_terms(output, F.normalize(draw(2, 3, 16), dim=0))
    (gradient,) = torch.autograd.grad(terms["scale"], output)
    centered = output - output.mean(dim=1, keepdim=True)
    assert ((gradient * centered).sum() < 0).item()
    collapsed = torch.zeros(2, 8, 3, requires_grad=True)
    scale = sum(gaussian_terms(collapsed, torch.eye(3)).values())
    (gradient,) = torch.autograd.grad(scale, collapsed)
    assert gradient.isfinite().all()


def test_slices_are_unit_vectors_that_change() -> None:
    task = MiniTask("visreg", {"out_dim": 4, "hidden_dim": 7, "num_slices": 6})
    first, second = (task.run(1).last_batch["slices"] for _ in range(2))
    assert torch.allclose(first.norm(dim=0), torch.ones(6))
    assert (first - second).abs().min() > 0
