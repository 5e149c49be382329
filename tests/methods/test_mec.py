"""MEC against the figures of its authors' code, and the logarithm that it approximates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import MiniTask, loss_of
from selftask.config.run_length import RunLength
from selftask.methods.mec import MEC, mec_loss
from selftask.optim.schedules import build_schedule

# xinliu20/MEC for seeds 0 and 500: loss, gradients of both predictions
MEC_LOSS = [
    (-0.03381965136124979, 0.026909944905361076, 0.024066611662119944),
    (0.036954066793174985, 0.02602988863466472, 0.025968646876380223),
]


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors_code(case: int) -> None:
    seed = 500 * case
    prediction = torch.stack([draw(seed + view, 16, 24) for view in (0, 1)]).requires_grad_()
    target = torch.stack([draw(seed + view, 16, 24) for view in (3, 2)])  # of the other view
    loss = mec_loss(prediction, target, distortion=64.0, expansion=1.0, order=4)
    (gradient,) = torch.autograd.grad(loss, prediction)
    computed = (loss.item(), *gradient.norm(dim=(1, 2)).tolist())
    assert computed == pytest.approx(MEC_LOSS[case], rel=1e-9)


@pytest.mark.parametrize("shape", [(8, 5), (5, 8)])
def test_series_approaches_the_logarithm_of_the_determinant(shape: tuple[int, int]) -> None:
    """Of either product, whichever is smaller; eq. 3 with both views the same."""
    rows = draw(1, *shape).expand(2, *shape)
    units = F.normalize(rows[0], dim=1)
    scale = 4 * shape[0] * 64.0 / shape[1]
    exact = torch.logdet(torch.eye(shape[0]).double() + units @ units.T / scale)
    loss = mec_loss(rows, rows, distortion=64.0, expansion=4.0, order=8)
    assert loss.item() == pytest.approx(-scale / shape[0] * exact.item(), rel=1e-9)


def test_expansion_falls_in_the_warm_up() -> None:
    """8 / lambda to 1 / lambda in ten epochs; the authors reach it a step earlier."""
    length = RunLength(num_samples=160, batch_size=16, epochs=20)
    expansion_at = build_schedule(MEC.Config().expansion, length)
    values = [expansion_at(step / 200) for step in (0, 50, 100, 150, 199)]
    assert values == pytest.approx([8.0, 4.5, 1.0, 1.0, 1.0])


def test_a_view_predicts_the_teachers_projection_of_the_other_view() -> None:
    """With the expansion of the step: two ninths of the run are done."""
    expansion = {"name": "linear", "start": 10.0, "end": 1.0}
    sizes = {"out_dim": 6, "hidden_dim": 7, "predictor_dim": 5}
    task = MiniTask("mec", {**sizes, "expansion": expansion}).run(2)
    batch = task.forward(torch.arange(8))
    first, second = task.loss.teacher(batch.input)
    expected = mec_loss(
        batch.output[:, :, 1],
        torch.stack([second, first]),
        distortion=64.0,
        expansion=10.0 - 9 * 2 / 9,
        order=4,
    )
    loss = loss_of(task.loss, batch.output, **batch.added)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
