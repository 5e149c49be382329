"""The feature queue against a list of bounded length, on one and two ranks."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from selftask.distributed.collectives import world_size
from selftask.models.feature_queue import FeatureQueue


def _queue(length: int = 7, *shape: int) -> FeatureQueue:
    torch.manual_seed(0)
    return FeatureQueue(length, *(shape or (3,))).double()


def _draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _sorted(rows: Tensor) -> list[list[float]]:
    return sorted(rows.flatten(1).tolist())


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_the_newest_rows_replace_the_oldest(shape: tuple[int, ...]) -> None:
    """Batches of different sizes, of which one is larger than the queue."""
    queue = _queue(7, *shape)
    expected: deque[Tensor] = deque(queue.rows.clone(), maxlen=7)
    for step, size in enumerate([3, 3, 5, 9, 1, 7]):
        rows = _draw(step, size, *shape)
        queue.update(rows)
        expected.extend(rows)
        assert _sorted(queue.rows) == _sorted(torch.stack(list(expected)))
        assert torch.equal(queue.rows[queue.oldest], expected[0])


def test_the_first_entries_are_unit_vectors() -> None:
    queue = _queue(7, 2, 3)
    assert queue.rows.norm(dim=2) == pytest.approx(torch.ones(7, 2), abs=1e-6)
    assert list(queue.state_dict()) == ["rows", "oldest"]


def test_a_queue_without_entries_keeps_nothing() -> None:
    queue = _queue(0)
    assert len(queue) == 0
    assert queue.rows.shape == (0, 3)


def test_rows_in_half_precision_do_not_change_its_format() -> None:
    queue = FeatureQueue(7, 3)
    queue.update(torch.ones(2, 3).bfloat16())
    assert queue.rows.dtype == torch.float32


def test_every_rank_holds_what_one_would() -> None:
    alone = _updated(0)
    for state in run_ranks(_updated, 2):
        for name, value in state.items():
            assert torch.equal(value, alone[name])


def _updated(rank: int) -> dict[str, Tensor]:
    queue = _queue()
    for step in range(3):
        queue.update(_draw(step, 4, 3).chunk(world_size())[rank])
    return queue.state_dict()
