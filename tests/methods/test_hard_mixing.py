"""MoCHi's mixed negatives beside figures of SynCo's code, and in MoCo."""

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
from selftask.errors import ConfigError
from selftask.methods.families.hard_mixing import HardMixingConfig
from selftask.models.losses.contrast import info_nce

N, D, K, HARD, M, T = 4, 12, 16, 6, 5, 0.2
FIGURES = {  # seed, kinds -> loss and gradient of SynCo's code
    (0, "plain"): (3.0358366967590564, 0.7305836582552607),
    (0, "mixup"): (3.6422663800925377, 0.7650951787779963),
    (0, "interpolation"): (4.356611968786785, 0.7545322965829478),
    (0, "mochi"): (4.563440334706424, 0.765588307041933),
    (500, "mixup"): (4.430767237316999, 0.878135400969666),
    (500, "interpolation"): (5.157337543580569, 0.8793826799476372),
    (500, "mochi"): (5.350971058326976, 0.879744586197152),
}


def counted(modulus: int, *shape: int) -> Tensor:
    """The numbers that stand for random ones there: 0, 1, ... modulo a number, made shares."""
    size = math.prod(shape)
    return ((torch.arange(size, dtype=torch.float64) % modulus + 0.5) / modulus).view(shape)


def draws_of(pairs: int, queries: int) -> Tensor:
    indices = [*counted(HARD, 2, N, pairs), counted(HARD, N, queries)]
    return torch.cat([*indices, counted(7, N, pairs), counted(7, N, queries)], dim=1)[None]


@pytest.mark.parametrize(("seed", "kind"), FIGURES)
def test_figures_of_the_authors_code(seed: int, kind: str) -> None:
    pairs = M if kind in ("mixup", "mochi") else 0
    queries = M if kind in ("interpolation", "mochi") else 0
    query = draw(seed, N, D).requires_grad_()
    key = F.normalize(draw(seed + 1, N, D), dim=1)
    queue = F.normalize(draw(seed + 90, K, D), dim=1)[None]
    config = HardMixingConfig(mix_pairs=pairs, mix_queries=queries, mix_hardest=HARD)
    units = F.normalize(query.detach(), dim=1)[None]
    own = config.mixed(units, queue, draws_of(pairs, queries))
    loss = info_nce(query[None], key[None], queue, own, temperature=T)
    (gradient,) = torch.autograd.grad(loss, query)
    expected = FIGURES[seed, kind]
    assert float(loss.detach()) == pytest.approx(expected[0], rel=1e-9)
    assert float(gradient.norm()) == pytest.approx(expected[1], rel=1e-9)


def test_the_hardest_entries_are_chosen_in_float32() -> None:
    """In bfloat16 many similarities of a large queue are equal."""
    queries = F.normalize(draw(0, 2, D).float(), dim=1)[None]
    queue = F.normalize(draw(1, 4 * K * K, D).float(), dim=1)[None]
    config = HardMixingConfig(mix_pairs=64, mix_hardest=64)
    draws = torch.rand(1, 2, 3 * 64, generator=torch.Generator().manual_seed(0))
    expected = config.mixed(queries, queue, draws)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(config.mixed(queries, queue, draws), expected)


def test_mixed_negatives_are_those_of_the_paper() -> None:
    """Section 3.3, one at a time: of the hardest entries only, on the sphere, without gradient."""
    query = F.normalize(draw(0, 2, 3, D), dim=2)
    queue = F.normalize(draw(1, 2, K, D), dim=2)
    config = HardMixingConfig(mix_pairs=2, mix_queries=1, mix_hardest=4)
    uniform = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mixed = config.mixed(query, queue, uniform)
    assert mixed.shape == (2, 3, 3, D)
    for v in range(2):
        for b in range(3):
            hard = queue[v][(queue[v] @ query[v, b]).argsort(descending=True)[:4]]
            draws = uniform[v, b]
            rows = [hard[int(4 * float(share))] for share in draws[:5]]
            alpha, beta = draws[5:7], 0.5 * draws[7]
            expected = [
                alpha[0] * rows[0] + (1 - alpha[0]) * rows[2],
                alpha[1] * rows[1] + (1 - alpha[1]) * rows[3],
                beta * query[v, b] + (1 - beta) * rows[4],
            ]
            for actual, row in zip(mixed[v, b], expected, strict=True):
                assert torch.allclose(actual, row / row.norm(), rtol=1e-12)


WORDS = ("method.mix_pairs=3", "method.mix_queries=2", "method.mix_hardest=8", "method.mix_start=2")


def test_negatives_are_mixed_from_the_start_time_and_resumed(tmp_path: Path) -> None:
    plain = tiny.train("moco", tmp_path, "plain", "train.max_steps=5")
    mixed = tiny.train("moco", tmp_path, "mixed", *WORDS, "train.max_steps=5")
    losses = [[row["loss"] for row in tiny.rows(task.out)] for task in (plain, mixed)]
    assert losses[0][:2] == losses[1][:2] and losses[0][2] < losses[1][2], "more negatives"
    assert mixed.loss.chance_loss == pytest.approx(math.log(1 + 2 * tiny.BATCH_SIZE + 5))
    tiny.train("moco", tmp_path, "stopped", *WORDS, "train.max_steps=5", "train.stop_at=3")
    resumed = tiny.train("moco", tmp_path, "stopped", *WORDS, "train.max_steps=5")
    states = [task.base_model.state_dict() for task in (mixed, resumed)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("symmetric", [False, True])
def test_hard_mixing_is_the_same_on_one_and_two_ranks(
    symmetric: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "moco", f"method.symmetric={symmetric}".lower(), *WORDS[:2], "--ranks=1,2"]
    assert main([*words, "method.mix_start=0"]) == 0, capsys.readouterr().out


def test_more_hard_entries_than_the_queue_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mix_hardest: 1000 is more than queue_size: 32"):
        tiny.config("moco", tmp_path, "run", *WORDS[:1], "method.mix_hardest=1000")
