"""Masks of patches: their shapes by the papers, and the same for a sample in any batch."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.models.masks import (
    MultiBlockMask,
    cut_out,
    padded_indices,
    possible_areas,
    random_mask,
    rolled_rectangle,
    scattered_squares,
)

GRIDS = [(8, 8), (14, 14), (7, 7), (16, 16), (6, 10)]
PAPER: dict[str, Any] = {
    "num_targets": 4,
    "target_scale": (0.15, 0.2),
    "target_ratio": (0.75, 1.5),
    "context_scale": (0.85, 1.0),
    "min_context": 10,
    "max_context": 0.5,
}


def _sampler(grid: tuple[int, int], **options: Any) -> MultiBlockMask:
    return MultiBlockMask(grid, **{**PAPER, **options})


def _keys(epoch: int, index: Tensor) -> Tensor:
    return torch.stack([torch.full_like(index, epoch), index], dim=1)


def _masks(blocks: MultiBlockMask, num: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Contexts (num, N) and targets (num, M, N) as masks, from their padded indices."""
    masks = []
    for indices, padding in blocks.draw(seed, _keys(0, torch.arange(num))):
        count = F.one_hot(indices, blocks.num_patches) * ~padding[..., None]
        assert int(count.sum(dim=-2).max()) == 1  # no patch twice
        masks.append(count.sum(dim=-2).bool())
    return masks[0], masks[1]


@pytest.mark.parametrize("grid", GRIDS)
def test_targets_are_rectangles_of_the_papers_size(grid: tuple[int, int]) -> None:
    """Area 15 to 20 % of the image and aspect 0.75 to 1.5, each side rounded to patches."""
    _, targets = _masks(_sampler(grid), 500)
    places = targets.unflatten(2, grid)
    height, width = places.any(dim=3).sum(dim=2), places.any(dim=2).sum(dim=2)  # (500, M)
    assert torch.equal(targets.sum(dim=2), height * width)  # full rectangles
    for side in (places.any(dim=3), places.any(dim=2)):
        ends = F.pad(side.int(), (1, 1)).diff(dim=2).abs().sum(dim=2)
        assert (ends == 2).all()  # in one piece
        assert side.any(dim=(0, 1)).all()  # anywhere on the grid
    area = height * width
    slack = (height + width) / 2  # half a patch around
    assert (area - slack <= 0.2 * grid[0] * grid[1]).all()
    assert (area + slack >= 0.15 * grid[0] * grid[1]).all()
    mean = float(area.float().mean()) / (grid[0] * grid[1])
    assert mean == pytest.approx(0.175, rel=0.08)


@pytest.mark.parametrize("grid", GRIDS)
def test_contexts_show_no_target(grid: tuple[int, int]) -> None:
    config = {"min_context": 1, "max_context": 1.0}
    context, targets = _masks(_sampler(grid, **config), 500)
    assert not (context[:, None] & targets).any()
    assert int(context.sum(dim=1).min()) >= 1
    free = ~targets.any(dim=1)
    assert float(context.sum() / free.sum()) > 0.8  # most of what is not a target
    with_limit, same = _masks(_sampler(grid, min_context=1), 500)
    assert torch.equal(same, targets)
    assert int(with_limit.sum(dim=1).max()) <= (grid[0] * grid[1]) // 2
    assert not (with_limit & ~context).any()  # random ones go
    large = context.sum(dim=1) > (grid[0] * grid[1]) // 2
    assert (with_limit[~large] == context[~large]).all()


@pytest.mark.parametrize("grid", GRIDS)
def test_tensors_have_room_for_every_block_and_no_more(grid: tuple[int, int]) -> None:
    """All sizes that real areas and aspects round to, found by trying a fine mesh of them."""
    results = set()
    for step in range(401):
        area = 0.15 + 0.05 * step / 400
        for other in range(401):
            aspect = 0.75 + 0.75 * other / 400
            height = round(grid[0] * math.sqrt(area * aspect))
            results.add(height * round(grid[1] * math.sqrt(area / aspect)))
    possible = possible_areas((0.15, 0.2), (0.75, 1.5), grid, "target_scale")
    assert results <= set(possible)
    assert max(results) == max(possible) == _sampler(grid).most_target
    assert min(results) == min(possible)


def test_blocks_depend_on_seed_epoch_and_image_only() -> None:
    blocks = _sampler((8, 8))
    index = torch.arange(40)
    whole = blocks.draw(1, _keys(2, index))
    part = blocks.draw(1, _keys(2, index.flip(0)[5:9]))
    for one, other in zip(whole, part, strict=True):
        for x, y in zip(one, other, strict=True):
            assert torch.equal(x.flip(0)[5:9], y)
    for seed, epoch in ((1, 3), (0, 2)):
        other, _ = blocks.draw(seed, _keys(epoch, index))
        assert not torch.equal(other[0], whole[0][0])


def test_too_small_a_context_gets_targets_back_last_first() -> None:
    block = torch.ones(3, 6, dtype=torch.bool)
    targets = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()
    targets = targets.expand(3, 3, 6)
    for least, left in ((0, []), (1, [4, 5]), (2, [4, 5]), (3, [2, 3, 4, 5]), (5, range(6))):
        context = cut_out(block, targets, least=least)
        assert context[0].nonzero().flatten().tolist() == list(left)
    assert cut_out(block, targets, least=7).all()  # as much as there is


def test_padded_indices_are_the_true_places() -> None:
    mask = torch.rand(5, 3, 16) < 0.4
    indices, padding = padded_indices(mask, 16)
    for row, places, fill in zip(
        mask.flatten(0, 1), indices.flatten(0, 1), padding.flatten(0, 1), strict=True
    ):
        assert places[~fill].tolist() == row.nonzero().flatten().tolist()
        assert sorted(places.tolist()) == list(range(16))
    short, none = padded_indices(torch.ones(1, 16, dtype=torch.bool), 3)
    assert short.tolist() == [[0, 1, 2]]
    assert not none.any()


def test_padded_indices_lose_the_last_of_an_order() -> None:
    mask = torch.tensor([[True, False, True, True, False, True]])
    order = torch.tensor([[0.9, 0.0, 0.1, 0.999, 0.0, 0.0]])
    indices, padding = padded_indices(mask, 3, order)
    assert indices.tolist() == [[5, 2, 0]]
    assert not padding.any()


def test_random_squares_are_those_of_simmim() -> None:
    """Its published generator: 22 of 36 squares of 32 pixels, 1408 of 2304 patches of 4 pixels."""
    mask = random_mask(0, _keys(0, torch.arange(50)), (48, 48), ratio=0.6, unit=8)
    assert (mask.sum(dim=1) == 1408).all()
    squares = mask.view(50, 6, 8, 6, 8).float().mean(dim=(2, 4))  # all or nothing of each
    assert set(squares.unique().tolist()) == {0.0, 1.0}
    assert (squares.sum(dim=(1, 2)) == 22).all()


def test_random_masks_are_fair_and_only_of_seed_epoch_and_image() -> None:
    index = torch.arange(4000)
    whole = random_mask(1, _keys(2, index), (4, 4), ratio=0.75)
    often = whole.float().mean(dim=0)  # 0.75 within four deviations
    assert float((often - 0.75).abs().max()) < 4 * math.sqrt(0.75 * 0.25 / 4000)
    part = random_mask(1, _keys(2, index.flip(0)[:100]), (4, 4), ratio=0.75)
    assert torch.equal(part, whole.flip(0)[:100])
    for seed, epoch in ((1, 3), (0, 2)):
        other = random_mask(seed, _keys(epoch, index), (4, 4), ratio=0.75)
        assert not torch.equal(other, whole)


# -- rectangles that are rolled, and squares ---------------------------------------------------


@pytest.mark.parametrize("grid", [(14, 14), (4, 4), (2, 32), (32, 2), (6, 10)])
def test_rolled_rectangles_are_those_of_capi(grid: tuple[int, int]) -> None:
    """Rolled back they fill whole rows, but the last; each patch is inside equally often."""
    count = grid[0] * grid[1] - int(grid[0] * grid[1] * 0.65)
    draws = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0))
    inside = rolled_rectangle(draws, count, grid)
    assert (inside.sum(dim=1) == count).all()
    share = count / inside.shape[1]
    assert inside.double().mean(dim=0).std() < 1.5 * math.sqrt(share * (1 - share) / 4000)
    draws[:, 1:] = 0.0
    rectangle = rolled_rectangle(draws, count, grid).unflatten(1, grid)
    height, width = rectangle.any(dim=2).sum(dim=1), rectangle.any(dim=1).sum(dim=1)
    number = torch.arange(height.max() * grid[1])  # row by row
    for image in range(0, 4000, 97):
        rows, columns = int(height[image]), int(width[image])
        cut = rectangle[image, :rows, :columns].flatten()
        assert torch.equal(cut, number[: rows * columns] < count)
        assert rows * columns - count < columns
    if grid == (14, 14):
        aspect = (height / width).unique()
        assert 0.5 <= aspect.min() < 0.6 and 1.7 < aspect.max() <= 2.0


def test_rolled_rectangles_hide_as_often_as_those_of_capis_code() -> None:
    """facebookresearch/capi: 127 of 196 hidden; deviation over patches of 200 draws: 0.0266."""
    generator, spreads = torch.Generator().manual_seed(0), []
    for _ in range(25):
        inside = rolled_rectangle(torch.rand(200, 3, generator=generator), 69, (14, 14))
        spreads.append((~inside).double().mean(dim=0).std().item())
    assert min(spreads) < 0.026638516830436488 < max(spreads)


def test_squares_are_cut_at_the_edges() -> None:
    centers = torch.tensor([[0.0, 0.5], [0.999, 0.3]])  # patches 0 and 10, 19 and 6 of 4 x 5
    squares = scattered_squares(centers, 3, (4, 5)).unflatten(1, (4, 5)).int().tolist()
    assert squares == [
        [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]],
        [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]],
    ]


def test_squares_are_as_uneven_as_those_of_data2vec_2() -> None:
    """fairseq, compute_block_mask_2d: 5 squares, 39 visible patches; deviation of 200 draws."""
    generator, spreads = torch.Generator().manual_seed(0), []
    for _ in range(25):
        squares = scattered_squares(torch.rand(200, 5, generator=generator), 3, (14, 14))
        visible, _ = padded_indices(squares, 39, torch.rand(200, 196, generator=generator))
        shown = torch.zeros(200, 196).scatter(1, visible, 1.0)
        assert (shown.sum(dim=1) == 39).all()
        spreads.append(shown.mean(dim=0).std().item())
    for figure in (0.04129604995250702, 0.04857169836759567):
        assert abs(figure - statistics.mean(spreads)) < 3 * statistics.stdev(spreads)
