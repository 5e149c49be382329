"""Activation checkpointing by a budget: what is kept stays within it, and nothing else changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from selftask.config.values.budget import Budget, parse_budget
from selftask.parallel.activation_budget import ActivationBudget, choose
from selftask.parallel.activation_checkpointing import checkpoint_blocks


class Residual(nn.Module):
    """Keeps more the wider it is inside; draws, and moves statistics."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.mlp = nn.Sequential(nn.Linear(8, inner), nn.GELU(), nn.Linear(inner, 8))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.mlp(self.norm(x)))
        return y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(inner) for inner in (16, 64, 16, 32))).double()


def bytes_kept(model: nn.Module, x: Tensor) -> int:
    """Of all tensors that a forward pass keeps, parameters left out; the memory behind them."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        output = model(x)
    del output
    return sum(size for place, size in kept.items() if place not in own)


def step(model: nn.Module, x: Tensor) -> None:
    """Two passes, as in multi-crop."""
    (model(x) + model(2 * x)).square().sum().backward()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_what_is_kept_stays_within_the_budget(
    share: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    x = torch.randn(32, 8, dtype=torch.float64)
    plain, all_of_it, some = network(), network(), network()
    checkpoint_blocks(list(all_of_it))
    most, least = 2 * bytes_kept(network(), x), 2 * bytes_kept(all_of_it, x)
    limit = round(least * 1.01 + share * (most * 1.01 - least))
    budget = ActivationBudget(list(some), Budget(limit, "byte"))
    for number in range(2):
        for model in (plain, some):
            torch.manual_seed(number)
            step(model, x)
        budget.finalize()
    for (name, a), b in zip(plain.named_buffers(), some.buffers(), strict=True):
        assert torch.equal(a, b), name
    chosen = [bool(block._is_recomputed) for block in some]  # type: ignore[union-attr]
    assert least <= 2 * bytes_kept(some, x) <= limit
    assert sum(chosen) == {0.0: 4, 0.3: 3, 0.5: 2, 0.8: 1, 1.0: 0}[share]
    assert chosen[1] or share == 1.0, "the widest comes first"
    assert f"{sum(chosen)} of 4 blocks are recomputed" in caplog.text
    assert "less is not possible" not in caplog.text
    for (name, a), b in zip(plain.named_parameters(), some.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]


def test_the_fewest_are_chosen_and_of_equal_ones_the_first() -> None:
    whole, recomputed = [10, 30, 10, 10], [1, 1, 1, 20]
    assert choose(whole, recomputed, 60) == set()
    assert choose(whole, recomputed, 59) == {1}
    assert choose(whole, recomputed, 31) == {1}
    assert choose(whole, recomputed, 30) == {0, 1}
    assert choose(whole, recomputed, 0) == {0, 1, 2}, "the last saves nothing"


def on_different_batches(rank: int) -> list[bool]:
    """Which blocks a rank recomputes that would keep 100 in the first, or in the last, of four."""
    model = network()
    budget = ActivationBudget(list(model), Budget(150, "byte"))
    for number in range(4):
        budget._stored[number] = 100 if number == 3 * rank else 40
        budget._recomputed[number] = 10
    budget.finalize()
    return [bool(block._is_recomputed) for block in model]  # type: ignore[union-attr]


ON_RANKS = (on_different_batches,)


def test_all_ranks_choose_the_same(rank_results: list[dict[str, Any]]) -> None:
    for of_rank in rank_results:
        assert of_rank["on_different_batches"] == [True, False, False, True]


def test_a_budget_that_cannot_be_met_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    budget = ActivationBudget(list(model), parse_budget("1 KB"))
    step(model, torch.randn(32, 8, dtype=torch.float64))
    budget.finalize()
    assert "4 of 4 blocks are recomputed" in caplog.text
    assert "the budget is 1.0 kB: less is not possible" in caplog.text


def test_sizes_and_shares() -> None:
    assert parse_budget("8 GB") == Budget(8e9, "byte")
    assert parse_budget("1.5GiB").limit(0) == 3 << 29
    assert parse_budget(0.5).limit(1000) == parse_budget("0.5").limit(1000) == 500
    for wrong in ("block", "8", "8 XB", "-1", 1.5):
        with pytest.raises(ValueError, match=r"did you mean 'blocks'|a share|not a budget"):
            parse_budget(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_ends_with_the_same_tensors(
    tmp_path: Path, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    more = ["train.max_steps=3", "hooks.export=null"]
    if accumulate > 1:
        more += ["train.step=accumulate", f"train.accumulate={accumulate}"]
    ends: list[dict[str, Any]] = []
    for out, word in (("plain", "none"), ("budget", "0.6")):
        tiny.train("byol", tmp_path, out, *more, f"parallel.activation_checkpointing={word}")
        ends.append(tiny.last_state(tmp_path / out))
    assert tiny.differences(*ends) == []
    (line,) = [r.message for r in caplog.records if r.message.startswith("activations: ")]
    chosen, of, blocks, *_ = line.removeprefix("activations: ").split()
    assert of == "of"
    assert 0 < int(chosen) < int(blocks)
