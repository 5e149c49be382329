"""LeJEPA against the figures of its authors' code, closed forms of SIGReg, and itself on two ranks.

The authors' code computes its knots in float32, so 1e-6 is what its figures can show.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from figures import draw
from minitask import MiniTask
from ranks import run_ranks
from selftask.batch import Batch
from selftask.methods.lejepa import LeJEPA, sigreg

# rbalestr-lab/lejepa: epps_pulley.py for each column of (20, 6); MINIMAL.md for (4, 20, 6), with
# 16 slices and lambda 0.02; for two sets of inputs
COLUMNS: list[dict[tuple[float, int], list[float]]] = [
    {
        (3.0, 17): [
            *(0.32855681610673415, 0.8144199446389366, 0.6893795985822482),
            *(3.467308580860205, 1.4146928920998652, 2.5163950975299936),
        ],
        (5.0, 31): [
            *(0.34094452719626345, 0.8331336970283143, 0.6962851122343852),
            *(3.472598630049333, 1.4261720118622858, 2.519583826553344),
        ],
    },
    {
        (3.0, 17): [
            *(1.0830102232977654, 0.5190835593812217, 1.4736912064125718),
            *(2.6735679609861407, 0.21002454225590939, 1.954059176799419),
        ],
        (5.0, 31): [
            *(1.092193172032245, 0.5268834546145015, 1.4864117653022095),
            *(2.6787232883087757, 0.2199436571420756, 1.9584237080901434),
        ],
    },
]
# center: SIGReg, distance to the center, norm of the loss's gradient
LOSSES: list[dict[Any, tuple[float, float, float]]] = [
    {
        "all": (0.9512392999654321, 0.8391361176745382, 0.08385969748105053),
        "global": (0.9512392999654321, 1.1279388791062326, 0.11860108108145617),
    },
    {
        "all": (1.306051775727287, 0.7811717229538159, 0.08034572924642411),
        "global": (1.306051775727287, 1.0272406870692354, 0.11121514509145955),
    },
]
SEEDS = (0, 500)
NONE = torch.empty(0, dtype=torch.int64)


def _terms(output: Tensor, slices: Tensor, **config: Any) -> dict[str, Tensor]:
    method = LeJEPA(LeJEPA.Config(out_dim=output.shape[2], hidden_dim=8, **config))
    added = {"slices": slices}
    batch = Batch(views={}, labels=NONE, index=NONE, key=NONE, output=output, added=added)
    return method(output, batch)


def _columns(x: Tensor, num_points: int, limit: float) -> list[float]:
    """The statistic of each column: a slice along each axis."""
    slices = torch.eye(x.shape[1], dtype=x.dtype)
    one = [slices[:, column : column + 1] for column in range(x.shape[1])]
    return [float(sigreg(x[None], axis, num_points=num_points, limit=limit)) for axis in one]


@pytest.mark.parametrize("case", [0, 1])
def test_the_statistic_is_that_of_the_authors_code(case: int) -> None:
    for (limit, num_points), figures in COLUMNS[case].items():
        columns = _columns(draw(SEEDS[case], 20, 6), num_points, limit)
        assert columns == pytest.approx(figures, rel=1e-6)


@pytest.mark.parametrize("center", ["all", "global"])
@pytest.mark.parametrize("case", [0, 1])
def test_loss_and_gradient_are_those_of_the_authors_code(case: int, center: Any) -> None:
    seed, (distribution, distance, gradient) = SEEDS[case], LOSSES[case][center]
    output = draw(seed + 1, 4, 20, 6).requires_grad_()
    slices = F.normalize(draw(seed + 2, 6, 16), dim=0)
    terms = _terms(output, slices, center=center, sigreg_weight=0.02)
    assert terms["sigreg"].item() == pytest.approx(0.02 * distribution, rel=1e-6)
    assert terms["prediction"].item() == pytest.approx(0.98 * distance, rel=1e-9)
    (terms["sigreg"] + terms["prediction"]).backward()
    assert output.grad is not None
    assert output.grad.norm().item() == pytest.approx(gradient, rel=1e-6)


def _epps_pulley(x: list[float]) -> float:
    """The statistic with the weight exp(-t^2 / 2), whose integral over all t has a closed form."""
    pairs = sum(math.exp(-((a - b) ** 2) / 2) for a in x for b in x)
    crossed = sum(math.exp(-(a**2) / 4) for a in x)
    root = math.sqrt(math.pi)
    return (
        math.sqrt(2) * root * pairs / len(x) - 2 * root * crossed + len(x) * root * math.sqrt(2 / 3)
    )


def test_the_statistic_is_its_closed_form() -> None:
    """With enough points; those of the default leave out what is beyond 3, less than 2 %."""
    x = draw(3, 9, 4) * torch.tensor([1.0, 0.3, 2.0, 1.0]) + 0.2
    expected = [_epps_pulley(column.tolist()) for column in x.T]
    assert _columns(x, 200, 12.0) == pytest.approx(expected, rel=1e-12)
    defaults = LeJEPA.Config()
    by_default = _columns(x, defaults.num_points, defaults.integral_limit)
    assert by_default == pytest.approx(expected, rel=0.02, abs=0.03)


def test_agreement_costs_nothing_and_a_collapse_does() -> None:
    """Equal views have no distance; equal images have the statistic of a constant, N times g's."""
    slices = F.normalize(draw(5, 6, 7), dim=0)
    spread = _terms(draw(4, 1, 20, 6).expand(3, 20, 6), slices)
    assert spread["prediction"].item() == pytest.approx(0.0, abs=1e-30)
    collapsed = _terms(torch.zeros(3, 20, 6, dtype=torch.float64), slices)
    assert collapsed["sigreg"].item() == pytest.approx(0.05 * _epps_pulley([0.0] * 20), rel=0.02)
    assert collapsed["sigreg"] > 4 * spread["sigreg"]


def test_slices_are_unit_vectors_that_are_new_in_each_step() -> None:
    """The run's loss is that of its slices, as loops over views and slices."""
    config = {"out_dim": 3, "num_slices": 5, "num_points": 60, "integral_limit": 8.0}
    task = MiniTask("lejepa", {**config, "hidden_dim": 8, "sigreg_weight": 0.3}).run(1)
    output, slices = task.last_batch.output.detach(), task.last_batch["slices"]
    assert torch.allclose(slices.norm(dim=0), torch.ones(5), rtol=0, atol=1e-6)
    columns = [(view @ slices[:, m].double()).tolist() for view in output for m in range(5)]
    expected = 0.3 * sum(map(_epps_pulley, columns)) / len(columns)
    assert float(task.last_batch.terms["sigreg"]) == pytest.approx(expected, rel=1e-7)
    task.run(1)
    assert not torch.allclose(slices, task.last_batch["slices"])


def _of_rank(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The loss of this rank's images, and the gradient of the mean over ranks for them."""
    slices = F.normalize(draw(5, 6, 7), dim=0)
    output = draw(4, 3, 8, 6).chunk(num_ranks, dim=1)[rank].contiguous().requires_grad_()
    terms = _terms(output, slices)
    (terms["prediction"] + terms["sigreg"]).backward()
    assert output.grad is not None
    return torch.stack([*terms.values()]).detach(), output.grad / num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_have_the_loss_and_gradients_of_one(num_ranks: int) -> None:
    terms, gradient = _of_rank(0, 1)
    of_ranks = run_ranks(_of_rank, num_ranks, num_ranks)
    torch.testing.assert_close(sum(t for t, _ in of_ranks) / num_ranks, terms)
    torch.testing.assert_close(torch.cat([g for _, g in of_ranks], dim=1), gradient)
    assert all(torch.equal(t[1], of_ranks[0][0][1]) for t, _ in of_ranks)  # one SIGReg for all
