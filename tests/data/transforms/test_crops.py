"""Crops at the ends of their ranges: every position, whole sides, odd paddings, custom ratios."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import torchvision.transforms.functional as F
from PIL import Image

from selftask.data.transforms.crops import CenterCrop, RandomCrop, RandomResizedCrop, Resize


def test_a_box_may_fill_a_side_and_lie_anywhere_along_the_other() -> None:
    """Boxes of three quarters of the area, twice as wide as high or the other way round."""
    draws, scale = np.random.default_rng(0), (0.75, 0.75)
    wide = RandomResizedCrop(size=8, scale=scale, ratio=(2.0, 2.0))
    boxes = {wide.draw(draws, 40, 60) for _ in range(200)}
    assert boxes == {(0, top, 60, top + 30) for top in range(11)}
    high = RandomResizedCrop(size=8, scale=scale, ratio=(0.5, 0.5))
    boxes = {high.draw(draws, 60, 40) for _ in range(200)}
    assert boxes == {(left, 0, left + 30, 60) for left in range(11)}


@pytest.mark.parametrize("size", [(300, 20), (20, 300), (299, 22)])
def test_the_box_in_the_middle_is_torchvisions(size: tuple[int, int]) -> None:
    """No box of the whole area fits such images; the ratios are not inverses of each other."""
    scale, ratio = [1.0, 1.0], [0.6, 1.25]
    top, left, h, w = tv.RandomResizedCrop.get_params(Image.new("L", size), scale, ratio)
    transform = RandomResizedCrop(size=8, scale=(1.0, 1.0), ratio=(0.6, 1.25))
    draws = np.random.default_rng(0)
    assert transform.draw(draws, size[1], size[0]) == (left, top, left + w, top + h)
    assert draws.random() == np.random.default_rng(0).random(41)[-1], "after ten attempts"


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


def test_corners_of_a_resized_image_are_those_of_the_image() -> None:
    """The sides of 44x61 pixels do not shrink by the same factor, since results are whole."""
    transform = Resize(size=17)
    params = transform.draw(np.random.default_rng(0), 44, 61)
    assert params == (44, 61, 17, 23)
    matrix = np.array(transform.source_matrix(params, 44, 61)).reshape(2, 3)
    np.testing.assert_allclose(matrix @ (23, 17, 1), (61, 44))
