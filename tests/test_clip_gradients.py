"""Clipping against its formula, of all gradients together and of each by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from selftask.hooks.clip_gradients import clip

GRADS = [[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]


def _parameters() -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(4)]
    for parameter, grad in zip(parameters, GRADS, strict=False):
        parameter.grad = torch.tensor(grad, dtype=torch.float64)
    return parameters  # the last one has none


def test_all_gradients_share_one_factor() -> None:
    parameters = _parameters()
    norm = math.sqrt(25 + 0.25)
    assert clip(parameters, 2.0).item() == pytest.approx(norm)
    for parameter, grad in zip(parameters, GRADS, strict=False):
        assert parameter.grad.tolist() == pytest.approx([x * 2 / (norm + 1e-6) for x in grad])
    assert parameters[3].grad is None
    clip(parameters, 100.0)  # below the bound: as they are
    assert torch.cat([p.grad for p in parameters[:3]]).norm() == pytest.approx(2.0, rel=1e-5)


def test_each_gradient_has_a_factor_of_its_own() -> None:
    """As in DINO's code: 2 / (5 + 1e-6) of the first, nothing of the second."""
    parameters = _parameters()
    assert clip(parameters, 2.0, per_parameter=True).item() == pytest.approx(math.sqrt(25.25))
    first = [x * 2 / (5 + 1e-6) for x in GRADS[0]]
    for parameter, expected in zip(parameters, [first, *GRADS[1:]], strict=False):
        assert parameter.grad.tolist() == pytest.approx(expected, rel=1e-12)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip([nn.Parameter(torch.zeros(2))], 1.0).item() == 0.0
