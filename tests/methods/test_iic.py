"""IIC against the figures of its authors' code, and its extremes."""

from __future__ import annotations

import math

import pytest
import torch

from figures import draw
from minitask import loss_of
from selftask.methods.iic import IIC

# xu-ji/IIC for seeds 0 and 500, lambda 1 and 1.5: loss and gradients of both views
PUBLISHED = {
    (0, 1.0): (-0.008856711005310755, 0.007460313801699998, 0.009662989129816514),
    (0, 1.5): (-1.5855375839344588, 0.024295333004417004, 0.027547558719347724),
    (500, 1.0): (-0.046559046004731375, 0.028283883958392216, 0.020426676114040063),
    (500, 1.5): (-1.6250158449771026, 0.03796082708298264, 0.027978990867800112),
}


@pytest.mark.parametrize(("seed", "spread"), PUBLISHED)
def test_loss_is_that_of_the_authors_code(seed: int, spread: float) -> None:
    logits = torch.stack([draw(seed + 2, 6, 5), draw(seed + 3, 6, 5)])[:, :, None].requires_grad_()
    loss = loss_of(IIC(IIC.Config(spread=spread)), logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    norms = gradient.flatten(1).norm(dim=1).tolist()
    assert (loss.item(), *norms) == pytest.approx(PUBLISHED[seed, spread], rel=1e-9)


def test_loss_is_the_mutual_information_by_its_definition() -> None:
    """H(a) + H(b) - H(a, b) of the joint distribution, one head and one pair at a time."""
    output = draw(7, 3, 8, 2, 4)
    p = output.softmax(dim=3)
    values = []
    for view in (1, 2):
        for head in range(2):
            pairs = [torch.outer(p[0, n, head], p[view, n, head]) for n in range(8)]
            joint = sum(pairs) / 8
            joint = (joint + joint.T) / 2
            entropy = [-(q * q.log()).sum() for q in (joint.sum(0), joint.sum(1), joint)]
            values.append(entropy[0] + entropy[1] - entropy[2])
    expected = -torch.stack(values).mean().item()
    assert loss_of(IIC(IIC.Config()), output).item() == pytest.approx(expected, rel=1e-12)


def test_iic_loss_of_agreeing_and_of_constant_predictions() -> None:
    """The same sure class in both views: -ln K; one class for all images: 0."""
    sure = 100 * torch.eye(6, dtype=torch.float64)[None, :, None].expand(2, 6, 1, 6)
    method = IIC(IIC.Config())
    assert loss_of(method, sure).item() == pytest.approx(-math.log(6), abs=1e-9)
    assert loss_of(method, sure[:, :1].expand(2, 6, 1, 6)).item() == pytest.approx(0, abs=1e-9)
    assert method.chance_loss == 0
