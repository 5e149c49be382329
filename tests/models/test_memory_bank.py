"""The memory bank against loops over images, on one and two ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from selftask.distributed.collectives import world_size
from selftask.models.memory_bank import MemoryBank

NUM_IMAGES, DIM = 20, 3


def _bank() -> MemoryBank:
    torch.manual_seed(0)
    return MemoryBank(NUM_IMAGES, DIM).double()


def _draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _unit(row: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in row))
    return [x / length for x in row]


def _slow_update(
    rows: list[list[float]], index: list[int], features: list[list[float]], momentum: float
) -> None:
    """Image by image, in the order of the batch; each from the entry before the batch."""
    before = [list(row) for row in rows]
    for image, feature in zip(index, features, strict=True):
        pairs = zip(before[image], _unit(feature), strict=True)
        rows[image] = _unit([momentum * old + (1 - momentum) * new for old, new in pairs])


def test_entries_are_unit_vectors_read_by_number() -> None:
    bank = _bank()
    assert len(bank) == NUM_IMAGES
    assert bank.rows.norm(dim=1) == pytest.approx(torch.ones(NUM_IMAGES), abs=1e-6)
    index = torch.tensor([[3, 1], [3, 0]])
    assert torch.equal(bank[index], torch.stack([bank.rows[[3, 1]], bank.rows[[3, 0]]]))
    assert list(bank.state_dict()) == ["rows"]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 1.0])
def test_update_is_a_moving_average_on_the_unit_sphere(momentum: float) -> None:
    bank = _bank()
    rows = bank.rows.tolist()
    for step in range(3):
        index = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(step))[:6]
        index[5] = index[1]  # the image came twice, in place of one that could not be read
        features = 5 * _draw(step, 6, DIM)
        bank.update(index, features, momentum)
        _slow_update(rows, index.tolist(), features.tolist(), momentum)
        assert torch.allclose(bank.rows, torch.tensor(rows, dtype=torch.float64), atol=1e-12)


def test_entries_may_have_several_vectors() -> None:
    bank = MemoryBank(NUM_IMAGES, 2, DIM)
    features = torch.randn(4, 2, DIM)
    bank.update(torch.arange(4), features)
    expected = features / features.norm(dim=2, keepdim=True)
    assert torch.allclose(bank[torch.arange(4)], expected, atol=1e-6)


def test_features_in_half_precision_do_not_change_its_format() -> None:
    bank = MemoryBank(NUM_IMAGES, DIM)
    bank.update(torch.arange(4), torch.randn(4, DIM).bfloat16())
    assert bank.rows.dtype == torch.float32
    assert bank.rows[:4].norm(dim=1) == pytest.approx(torch.ones(4), abs=1e-6)


def test_every_rank_holds_what_one_would() -> None:
    alone = _updated(0)
    for rows in run_ranks(_updated, 2):
        assert torch.equal(rows, alone)


def _updated(rank: int) -> Tensor:
    bank = _bank()
    index, features = torch.tensor([7, 2, 9, 2]), _draw(1, 4, DIM)
    bank.update(index.chunk(world_size())[rank], features.chunk(world_size())[rank], 0.5)
    return bank.rows
