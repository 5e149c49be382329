"""CO2's term beside lightly's figures and its formula, and in SimCLR and MoCo."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from figures import draw
from selftask.cli.main import main
from selftask.methods.families.consistency import consistency
from selftask.methods.moco import queue_cosines
from selftask.methods.simclr import negatives_of_pairs

FIGURES = [  # seed, images, width, lightly's value
    (0, 12, 10, 9.099940846422587),
    (500, 12, 10, 7.500696560670101),
]


def divergence(p: list[float], q: list[float]) -> float:
    """Kullback-Leibler divergence by its definition."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def softmax(values: list[float], temperature: float) -> list[float]:
    powers = [math.exp(value / temperature) for value in values]
    return [power / math.fsum(powers) for power in powers]


def by_formula(first: Tensor, second: Tensor, temperature: float) -> float:
    """Eq. 4 of the paper, row by row; entries of -inf are left out."""
    rows = []
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        compared = [i for i, value in enumerate(one) if value > -math.inf]
        p, q = (softmax([row[i] for i in compared], temperature) for row in (one, other))
        rows.append((divergence(p, q) + divergence(q, p)) / 2)
    return math.fsum(rows) / len(rows)


@pytest.mark.parametrize(("seed", "count", "dim", "expected"), FIGURES)
def test_value_is_that_of_lightly(seed: int, count: int, dim: int, expected: float) -> None:
    """Whose candidates have the positive, first, and the other view."""
    a, b = (F.normalize(draw(seed + k, count, dim), dim=1) for k in (0, 1))
    cosines = a @ b.T
    others = ~torch.eye(count, dtype=torch.bool)
    positive = cosines.diagonal()[:, None]
    logits = [torch.cat([positive, x[others].view(count, -1)], dim=1) for x in (cosines, cosines.T)]
    assert float(consistency(*logits, temperature=0.05)) == pytest.approx(expected, rel=1e-12)


def test_views_share_the_negatives_of_other_images() -> None:
    """Against the formula, for all pairs of three views; the views of an image are left out."""
    views = [draw(seed, 5, 4) for seed in range(3)]
    first, second = negatives_of_pairs(*views)
    units = torch.stack([F.normalize(view, dim=1) for view in views])
    cosines = torch.einsum("vbd,wcd->vbwc", units, units)
    cosines[:, range(5), :, range(5)] = -torch.inf
    rows = cosines.flatten(2)  # (V, B, VB)
    expected = [by_formula(rows[v], rows[w], 0.04) for v, w in ((0, 1), (0, 2), (1, 2))]
    actual = consistency(first, second, temperature=0.04)
    assert float(actual) == pytest.approx(sum(expected) / 3, rel=1e-12)


def test_queries_and_keys_share_the_queue() -> None:
    output, keys = draw(0, 2, 3, 4), F.normalize(draw(1, 2, 3, 4), dim=2)
    queue = F.normalize(draw(2, 2, 7, 4), dim=2)
    first, second = queue_cosines(output, keys, queue)
    units = F.normalize(output, dim=2)
    for row, (v, b) in enumerate((v, b) for v in range(2) for b in range(3)):
        assert torch.allclose(first[row], queue[v] @ units[v, b], rtol=1e-12)
        assert torch.allclose(second[row], queue[v] @ keys[v, b], rtol=1e-12)
    actual = float(consistency(first, second, temperature=0.04))
    assert actual == pytest.approx(by_formula(first, second, 0.04), rel=1e-12)
    assert float(consistency(first, first, temperature=0.04)) == 0, "its floor"


def test_gradients_are_those_of_finite_differences() -> None:
    """lightly's term has none. Columns of -inf do not make them NaN."""
    views = [draw(seed, 4, 3).requires_grad_() for seed in range(2)]

    def term(*inputs: Tensor) -> Tensor:
        return consistency(*negatives_of_pairs(*inputs), temperature=0.3)

    assert torch.autograd.gradcheck(term, views)
    assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(term(*views), views))


@pytest.mark.parametrize("method", ["simclr", "moco"])
def test_weight_of_the_term(method: str, tmp_path: Path) -> None:
    """0 is the method without it; else the row has both terms, whose sum is the loss."""
    rows = []
    for weight in (0, 3):
        out = f"run{weight}"
        tiny.train(
            method, tmp_path, out, f"method.consistency_weight={weight}", "train.max_steps=2"
        )
        rows.append(tiny.rows(tmp_path / out)[0])
    assert "consistency" not in rows[0] and rows[1]["consistency"] > 0
    assert rows[1]["recognition"] == pytest.approx(rows[0]["loss"], rel=1e-6)
    total = rows[1]["recognition"] + rows[1]["consistency"]
    assert rows[1]["loss"] == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("method", ["simclr", "moco"])
def test_consistency_loss_is_the_same_on_one_and_two_ranks(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", method, "method.consistency_weight=3", "--ranks=1,2", "--steps=2"]
    assert main(words) == 0, capsys.readouterr().out
