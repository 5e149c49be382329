"""Block masks against BEiT's published generator, written as loops with Python's own randomness."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from imagined_device import NAME, ImaginedDevice, in_process
from imagined_streams import is_view
from selftask.batch import Batch
from selftask.models.block_mask import BlockMask
from selftask.models.features.extract import adapter_of
from selftask.registry import METHODS

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


def _one_by_one(draws: list[list[float]], count: int, sampler: BlockMask) -> list[bool]:
    """One mask, rectangle after rectangle and patch by patch, in float32 as on any device."""
    (height, width), mask, failures = sampler.grid, [False] * sampler.num_patches, 0
    number = lambda x: torch.tensor(x, dtype=torch.float32)  # noqa: E731
    for draw in draws:
        area, aspect, down, right = (number(x) for x in draw)
        room = count - sum(mask)
        if room <= 0 or failures == 10:
            break
        most = min(room, sampler.max_patches)
        area = sampler.min_patches + number(most - sampler.min_patches) * area
        aspect = torch.exp(math.log(1 / 0.3) * (2 * aspect - 1))
        h, w = int((area * aspect).sqrt().round()), int((area / aspect).sqrt().round())
        inside = []
        if h < height and w < width:
            top = min(int(down * (height - h + 1)), height - h)
            left = min(int(right * (width - w + 1)), width - w)
            rows, columns = range(top, top + h), range(left, left + w)
            inside = [r * width + c for r in rows for c in columns if not mask[r * width + c]]
        failures = 0 if 0 < len(inside) <= most else failures + 1
        if failures == 0:
            for patch in inside:
                mask[patch] = True
    return mask


@pytest.mark.parametrize("more", [{}, {"min_patches": 9, "max_patches": 140}, {"max_tries": 7}])
def test_all_images_at_once_are_masked_like_one_after_another(more: dict[str, int]) -> None:
    """With the same draws, also for an image that is finished before the others."""
    sampler, counts = BlockMask((10, 14), **more), torch.tensor([84, 0, 3, 40, 1, 70])
    draws = torch.rand(6, sampler.num_draws, generator=torch.Generator().manual_seed(0))
    masks = sampler.from_draws(draws, counts).tolist()
    for mask, draw, count in zip(masks, draws.unflatten(1, (-1, 4)).tolist(), counts, strict=True):
        assert mask == _one_by_one(draw, int(count), sampler)


def test_few_operations_are_launched() -> None:
    """The count does not depend on the number of images or rectangles."""
    with Operations() as seen:
        BlockMask(GRID).draw(0, _keys(64), torch.full((64,), 100))
    assert seen.number < 100


@pytest.mark.parametrize("method", ["data2vec", "dinov2"])
def test_masks_are_copied_to_a_device_without_waiting(method: str) -> None:
    """Drawn on the host, in page-locked memory since they have more than 64 KiB."""
    launched, waits = in_process(prepared, method)
    assert waits == []
    assert 0 < launched <= 4, "the copies alone"


def prepared(method: str) -> tuple[int, list[str]]:
    """Prepare a batch of a method; return the number of launches, and the host's waits."""
    chosen = METHODS[method]
    loss = chosen(chosen.Config())
    vit: Any = VisionTransformer(img_size=32, patch_size=2, embed_dim=6, depth=6, num_heads=1)
    vit_task: Any = SimpleNamespace(
        base_model=SimpleNamespace(backbone=vit),
        config=SimpleNamespace(train=SimpleNamespace(seed=0)),
    )
    loss.grid_of = adapter_of(vit).grid
    with Launches() as device:
        images = torch.zeros(300, 3, 32, 32, device=NAME)
        views = {"main": [images] * (2 if method == "dinov2" else 1)}
        index = torch.arange(300, device=NAME)
        batch = Batch(views=views, labels=index, index=index, key=_keys(300))
        device.number = 0
        loss.prepare_batch(batch, vit_task)
        return device.number, device.waits


class Launches(ImaginedDevice):
    number = 0

    def launched(self, func: Any, args: Any) -> None:
        self.number += not is_view(func)


class Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


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
