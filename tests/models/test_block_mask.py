"""Block masks against BEiT's published generator, written as loops with Python's own randomness."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from selftask.models.block_mask import BlockMask

GRID = (14, 14)


def _keys(number: int, epoch: int = 0) -> Tensor:
    return torch.stack([torch.full((number,), epoch), torch.arange(number)], dim=1)


def _published(draws: random.Random, count: int, grid: tuple[int, int], most: int) -> list[int]:
    """unilm/beit/masking_generator.py:MaskingGenerator, patch by patch."""
    height, width = grid
    mask, masked = [0] * (height * width), 0
    while masked < count:
        room, delta = min(count - masked, most), 0
        for _ in range(10):
            area = draws.uniform(4, room)
            aspect = math.exp(draws.uniform(math.log(0.3), math.log(1 / 0.3)))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if w < width and h < height:
                top, left = draws.randint(0, height - h), draws.randint(0, width - w)
                inside = [r * width + c for r in range(top, top + h) for c in range(left, left + w)]
                already = sum(mask[place] for place in inside)
                if 0 < h * w - already <= room:
                    delta = h * w - already
                    for place in inside:
                        mask[place] = 1
            if delta > 0:
                break
        if delta == 0:
            break
        masked += delta
    return mask


@pytest.mark.parametrize("count", [20, 75])
def test_masks_are_distributed_as_the_published_ones(count: int) -> None:
    """Mean number of masked patches, their mean place, and neighbors that are masked together."""
    number = 3000
    draws = random.Random(0)
    expected = torch.tensor([_published(draws, count, GRID, 98) for _ in range(number)]).float()
    masks = BlockMask(GRID).draw(0, _keys(number), torch.full((number,), count)).float()
    assert masks.sum(dim=1).max() <= count
    for statistic in (_number, _neighbours, _in_the_middle):
        a, b = statistic(masks), statistic(expected)
        error = math.sqrt((a.var() + b.var()) / number)
        assert abs(a.mean() - b.mean()) < 4 * error, statistic.__name__


def _number(masks: Tensor) -> Tensor:
    return masks.sum(dim=1)


def _neighbours(masks: Tensor) -> Tensor:
    rows = masks.view(-1, *GRID)
    return (rows[:, :, 1:] * rows[:, :, :-1]).sum(dim=(1, 2))


def _in_the_middle(masks: Tensor) -> Tensor:
    return masks.view(-1, *GRID)[:, 4:10, 4:10].sum(dim=(1, 2))


def test_each_mask_has_its_own_number_at_most() -> None:
    counts = torch.arange(0, 50)
    masked = BlockMask((8, 6)).draw(0, _keys(50), counts).sum(dim=1)
    assert (masked <= counts).all()
    assert masked[0] == 0
    assert (masked[4:] > 0).all()


def test_a_mask_depends_on_seed_and_key_only() -> None:
    sampler, counts = BlockMask((8, 6)), torch.full((9,), 20)
    masks = sampler.draw(3, _keys(9), counts)
    assert masks.dtype == torch.bool and masks.shape == (9, 48)
    assert torch.equal(sampler.draw(3, _keys(9)[4:6], counts[4:6]), masks[4:6])
    assert len(masks.unique(dim=0)) == 9
    assert not torch.equal(sampler.draw(4, _keys(9), counts), masks)
    assert not torch.equal(sampler.draw(3, _keys(9, epoch=1), counts), masks)


def test_masks_are_unions_of_rectangles_of_the_sizes_asked_for() -> None:
    """With room for one rectangle only, the mask is that rectangle."""
    sampler = BlockMask((12, 12), min_patches=9, max_patches=9, min_aspect=0.999, max_tries=1)
    for mask in sampler.draw(0, _keys(20), torch.full((20,), 9)).view(-1, 12, 12):
        rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
        assert len(rows) == len(columns) == 3 and mask.sum() == 9
