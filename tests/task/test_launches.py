"""`tools/bench/launches.py`: kernels a step beside the networks' passes stay few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import launches
from imagined_device import in_process
from selftask.hooks.averages.weight_average import WeightAverage


def total(method: str, network: str, folder: Path, *more: str, loop: bool = False) -> int:
    """Return the launches of a step; ``loop`` plants an average that is a loop of kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if loop:
            patch.setattr(WeightAverage, "update", update_one_by_one)
        return launches.count(method, network, folder, *more).total()


@torch.no_grad()
def update_one_by_one(self: Any, weight: float) -> None:
    for averages, current in self.pairs:
        for average, value in zip(averages, current, strict=True):
            average.lerp_(value, weight)
    self.updates += 1


@pytest.mark.slow
def test_few_launches_beside_the_networks(tmp_path: Path) -> None:
    assert 0 < in_process(total, "dino", "vit_small", tmp_path) <= launches.BOUND


@pytest.mark.slow
def test_an_average_as_a_loop_is_seen(tmp_path: Path) -> None:
    averaged = in_process(total, "simclr", "resnet50", tmp_path, "hooks.ema={}")
    assert averaged <= launches.BOUND
    assert in_process(in_loop, tmp_path / "loop") > launches.BOUND


def in_loop(folder: Path) -> int:
    folder.mkdir()
    return total("simclr", "resnet50", folder, "hooks.ema={}", loop=True)


@pytest.mark.parametrize(
    ("recipe", "most"), [("dino/vit_small_imagenet", 300), ("simclr/resnet50_imagenet", 140)]
)
def test_few_launches_for_the_views_of_a_batch(recipe: str, most: int) -> None:
    """Ten views and two, by ``data.augment_on=device``."""
    assert 0 < in_process(total_of_views, recipe) <= most


def total_of_views(recipe: str) -> int:
    return launches.count_views(recipe).total()


def test_a_foreach_operation_is_as_many_kernels_as_torch_launches() -> None:
    """Limits of torch's MultiTensorApply.cuh: 64 tensors of two lists, 320 chunks of 65,536."""
    add = torch.ops.aten._foreach_add_.List
    small = [torch.empty(8, device="meta")] * 65
    assert launches.kernels(add, (small, small)) == 2
    assert launches.kernels(add, (small[:64], small[:64])) == 1
    big = [torch.empty(320 * 65_536 + 1, device="meta")]
    assert launches.kernels(add, (big, big)) == 2
    assert launches.kernels(torch.ops.aten.add.Tensor, (small[0], small[0])) == 1
