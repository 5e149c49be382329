"""CorInfoMax against the authors' figures over two steps, and its state over a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.corinfomax import CorInfoMax, determinant, running_statistics

# OFSkean/FroSSL's copy for seeds 0 and 500, two steps each: loss, determinant term, norms of the
# first covariance and mean, gradients of both views
STEPS = [
    [
        (
            748.1166084452693,
            1.2818001734220996,
            3.3290927220018056,
            0.5168107366360927,
            96.52500714140146,
            96.52006779885346,
        ),
        (
            696.0539218552154,
            0.9830510253170569,
            4.455690461104003,
            0.708792674686253,
            93.13438413230523,
            93.12488843002052,
        ),
    ],
    [
        (
            631.3827334536235,
            0.9064410564034017,
            4.527438775835004,
            0.6906877860557364,
            88.73378017518387,
            88.67930395302281,
        ),
        (
            661.4890672881521,
            1.0495127036305605,
            3.123267889958719,
            0.6595060733648814,
            90.82546782831535,
            90.78966641192052,
        ),
    ],
]


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_are_those_of_the_authors_code(case: int) -> None:
    """Of features as they are; the authors normalize them before."""
    mean = torch.zeros(2, 1, 10, dtype=torch.float64)
    covariance = torch.eye(10, dtype=torch.float64).repeat(2, 1, 1)
    for number, figures in enumerate(STEPS[case]):
        seed = 500 * case + 10 + 10 * number
        first = draw(seed, 16, 10)
        views = torch.stack([first, 0.5 * first + draw(seed + 1, 16, 10)]).requires_grad_()
        mean, covariance = running_statistics(views, mean, covariance, forgetting=0.01)
        term = determinant(covariance, epsilon=1e-8)
        loss = term + 500 * (views[0] - views[1]).square().mean()
        (gradient,) = torch.autograd.grad(loss, views)
        mean, covariance = mean.detach(), covariance.detach()
        state = (covariance[0].norm().item(), mean[0].norm().item())
        computed = (loss.item(), term.item(), *state, *gradient.norm(dim=(1, 2)).tolist())
        assert computed == pytest.approx(figures, rel=1e-9)


def test_terms_are_those_of_unit_vectors() -> None:
    """At the start the covariance is nearly the batch's own."""
    method = CorInfoMax(CorInfoMax.Config(out_dim=4, forgetting=0.0)).double()
    output = draw(1, 2, 12, 4)
    units = output / output.norm(dim=2, keepdim=True)
    determinants = [torch.linalg.det(torch.cov(view.T, correction=0)) for view in units]
    expected = -sum(value.log().item() for value in determinants) / 4
    assert method(output, None)["determinant"].item() == pytest.approx(expected, rel=1e-6)
    squares = [((a - b) ** 2).sum().item() / 4 for a, b in zip(*units, strict=True)]
    invariance = method(3 * output, None)["invariance"].item()
    assert invariance == pytest.approx(500 * sum(squares) / 12, rel=1e-9)


class Recorded(CorInfoMax):
    """Keeps the unit vectors of the network's outputs."""

    def on_forward(self, task: Any) -> None:
        super().on_forward(task)
        units = F.normalize(task.last_batch.output.detach(), dim=2)
        self.outputs = [*getattr(self, "outputs", []), units]


def test_statistics_are_averaged_over_all_batches() -> None:
    """Of a step of two batches and one of the third, as a loop with torch.cov."""
    config = {"out_dim": 3, "hidden_dim": 7, "forgetting": 0.75}
    method: Recorded = MiniTask(Recorded, config, accumulate=2).run(2).loss
    outputs = method.outputs
    assert len(outputs) == 3
    for view in (0, 1):
        mean = torch.zeros(3).double()
        covariance = torch.eye(3).double()
        for output in outputs:
            mean = 0.75 * mean + 0.25 * output[view].mean(dim=0)
            shift = output[view].mean(dim=0) - mean
            around = torch.cov(output[view].T, correction=0) + torch.outer(shift, shift)
            covariance = 0.75 * covariance + 0.25 * around
        torch.testing.assert_close(method.mean[view, 0], mean, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(method.covariance[view], covariance, rtol=1e-11, atol=1e-13)


def test_more_features_than_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.out_dim: the covariance of 64 features of 32"):
        load_config("corinfomax", ["train.batch_size=32", "method.out_dim=64"])
