"""How ``selftask check`` compares what ranks wrote down."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from selftask.equivalence.compare import compare, merge, relative_difference


def test_relative_difference() -> None:
    one = torch.tensor([1.0, -4.0]).double()
    assert relative_difference(one, one.clone()) == 0.0
    assert relative_difference(one, one + torch.tensor([0.0, 4e-9])) == pytest.approx(1e-9, 1e-5)
    tiny_one = torch.full((2,), 1e-18).double()
    assert relative_difference(tiny_one, -tiny_one) == 2.0
    assert relative_difference(tiny_one, -tiny_one, largest=1.0) == pytest.approx(2e-15)
    assert relative_difference(None, torch.zeros(2)) == 0.0, "no gradient is one of zero"
    assert relative_difference(None, torch.ones(2)) == 1.0
    for other in ("text", 3, [1.0]):
        assert relative_difference(None, other) == relative_difference(other, None) == math.inf
    for wrong in (one.float(), one[:1], one * math.nan, torch.tensor([1.0, math.inf]).double()):
        assert relative_difference(one, wrong) == math.inf
    assert relative_difference(torch.tensor([3]), torch.tensor([3])) == 0.0
    assert relative_difference(torch.tensor([3]), torch.tensor([4])) == math.inf


def record(index: list[int], term: float, grad: Tensor, queue: Tensor) -> dict[str, Any]:
    """What one rank could have written down in one step."""
    return {
        "samples": [torch.tensor(index)],
        "inputs": [{"input": torch.tensor(index).double()}],
        "loss": [torch.tensor(2.0)],
        "terms": [{"kl": torch.tensor(term)}],
        "gradients": [{"w": grad}],
        "network": {},
        "method": [{"queue": queue}],
        "optimizer": {},
    }


def test_ranks_are_put_together_and_each_is_looked_at() -> None:
    grad, queue = torch.ones(2), torch.arange(3.0)
    one = merge([record([5, 6, 7, 8], 0.5, grad, queue)])
    two = [record([5, 6], 0.2, grad, queue), record([7, 8], 0.8, grad, queue)]
    assert all(row.ok for row in compare(one, two, "2"))
    two[1] = record([8, 7], 0.8, grad, queue + torch.tensor([0.0, 0.0, 0.5]))
    rows = {row.quantity: row for row in compare(one, two, "2")}
    assert {name for name, row in rows.items() if not row.ok} == {"samples", "inputs", "method"}
    assert rows["method"].place == "step 1: queue (rank 1)"
    assert rows["method"].difference == pytest.approx(0.5 / 2.5)
    assert rows["inputs"].place == "step 1: input"
