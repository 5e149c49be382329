"""Crops at the ends of their ranges: every position, whole sides, odd paddings, custom ratios."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import torchvision.transforms.functional as F
from PIL import Image

from selftask.data.transforms.crops import CenterCrop, RandomCrop, RandomResizedCrop


def test_a_box_may_fill_a_side_and_lie_anywhere_along_the_other() -> None:
    """Squares of two thirds of the area have the length of the shorter side."""
    transform = RandomResizedCrop(size=8, scale=(2 / 3, 2 / 3), ratio=(1.0, 1.0))
    draws = np.random.default_rng(0)
    tall = {transform.draw(draws, 30, 20) for _ in range(200)}
    assert tall == {(0, top, 20, top + 20) for top in range(11)}
    wide = {transform.draw(draws, 20, 30) for _ in range(200)}
    assert wide == {(left, 0, left + 20, 20) for left in range(11)}


@pytest.mark.parametrize("size", [(300, 20), (20, 300), (299, 22)])
def test_the_box_in_the_middle_is_torchvisions(size: tuple[int, int]) -> None:
    """No box of the whole area fits such images; the ratios are not inverses of each other."""
    scale, ratio = [1.0, 1.0], [0.6, 1.25]
    top, left, h, w = tv.RandomResizedCrop.get_params(Image.new("L", size), scale, ratio)
    transform = RandomResizedCrop(size=8, scale=(1.0, 1.0), ratio=(0.6, 1.25))
    box = transform.draw(np.random.default_rng(0), size[1], size[0])
    assert box == (left, top, left + w, top + h)


def test_random_crop_takes_every_position() -> None:
    """From the first to the last one in the padded image, as torchvision."""
    transform, draws = RandomCrop(size=32, padding=1), np.random.default_rng(0)
    drawn = {transform.draw(draws, 31, 33) for _ in range(200)}
    torch.manual_seed(0)
    padded = Image.new("L", (35, 33))
    boxes = {tv.RandomCrop.get_params(padded, (32, 32)) for _ in range(200)}
    assert drawn == {(left, top) for top, left, _, _ in boxes}
    assert drawn == set(itertools.product(range(4), range(2)))


@pytest.mark.parametrize("size", [17, 44, 61])
def test_the_middle_of_odd_differences_is_torchvisions(size: int) -> None:
    image = np.arange(44 * 60 * 3, dtype=np.uint8).reshape(44, 60, 3)
    expected = np.asarray(F.center_crop(Image.fromarray(image), [size]))
    np.testing.assert_array_equal(CenterCrop(size=size).apply(image, ()), expected)
