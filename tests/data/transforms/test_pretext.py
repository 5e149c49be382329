"""Pretext views: what is done to the image, and that its label is known to the method."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from selftask.config.schema import Component, ViewConfig
from selftask.data.transforms.pipeline import Compose
from selftask.data.transforms.pretext import drawn_permutation, drawn_rotation, permutations
from selftask.data.views import Views
from selftask.errors import UserError
from selftask.random.views import draw_rng
from selftask.registry import TRANSFORMS

IMAGE = np.random.default_rng(0).integers(0, 256, (36, 48, 3), dtype=np.uint8)


def build(name: str, **args: Any) -> Any:
    return TRANSFORMS[name](**args)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def views_of(*transforms: tuple[str, dict[str, Any]], count: int = 1) -> Views:
    pipeline = [Component(name=name, args=args) for name, args in transforms]
    return Views({"main": ViewConfig(count=count, transforms=pipeline)})


def test_rotations_are_those_of_torch() -> None:
    for quarters in range(4):
        out = build("rotate_90", k=[quarters])(IMAGE, rng())
        expected = torch.rot90(torch.from_numpy(IMAGE), quarters, dims=(0, 1)).numpy()
        assert np.array_equal(out, expected)
        assert out.flags.c_contiguous


CROP = ("random_resized_crop", {"size": 24})  # takes more or fewer draws
NOISE = ("contrast_noise", {"noise": 0.0, "contrast": (0.9, 1.0)})


def test_the_drawn_rotation_is_known_whatever_comes_before() -> None:
    """Brightness grows from left to right, so the image shows how it was turned."""
    image = np.ascontiguousarray(np.tile(np.arange(48, dtype=np.uint8)[:, None], (36, 1, 3)))
    image[:] += np.arange(36, dtype=np.uint8)[:, None, None] // 4  # and a little downwards
    views = views_of(CROP, NOISE, ("rotate_90", {}), count=2)
    seen = []
    for epoch, index in itertools.product((0, 3), (0, 1, 2, 10**10, 7, 8)):
        for view, out in enumerate(views(image, 5, epoch, index)):
            values = out[..., 0].astype(int)
            edges = [values[:, -1], values[0], values[:, 0], values[-1]]  # right, top, left, bottom
            turned = int(np.argmax([edge.mean() for edge in edges]))
            assert turned == drawn_rotation(5, epoch, index, view)
            seen.append(turned)
    assert set(seen) == {0, 1, 2, 3}


def test_labels_are_even_and_independent_of_each_other_and_of_other_draws() -> None:
    n = 2000
    turns = np.array([drawn_rotation(0, 0, index, 0) for index in range(n)])
    again = np.array([drawn_rotation(0, 0, index, 1) for index in range(n)])
    other = np.array([drawn_permutation(0, 0, index, 0, 4) for index in range(n)])
    first = np.array([draw_rng(0, 0, index, 0).random() for index in range(n)]) * 4 // 1
    for labels in (turns, again, other):
        counts = np.bincount(labels, minlength=4)
        assert ((counts - n / 4) ** 2 / (n / 4)).sum() < 25  # chi-square, 3 degrees of freedom
    for a, b in itertools.combinations((turns, again, other, first.astype(int)), 2):
        table = np.bincount(a * 4 + b, minlength=16)
        assert ((table - n / 16) ** 2 / (n / 16)).sum() < 50  # 15 degrees
    assert {drawn_rotation(0, 0, index, 0, [1, 3]) for index in range(50)} == {1, 3}


def test_drawing_a_label_leaves_the_stream_where_it_is() -> None:
    a, b = draw_rng(1, 2, 3, 0), draw_rng(1, 2, 3, 0)
    a.random(), b.random()
    build("rotate_90").draw(a, 8, 8)
    assert np.array_equal(a.random(9), b.random(9))


@pytest.mark.parametrize(("grid", "tile"), [(2, None), (3, None), (3, 10), (4, 7)])
def test_jigsaw_puts_each_tile_in_its_place(grid: int, tile: int | None) -> None:
    """Each pixel holds the number of its cell and its place in it."""
    cell = 36 // grid, 48 // grid
    y, x = np.mgrid[0:36, 0:48]
    number = y // cell[0] * grid + x // cell[1]
    image = np.stack([number, y % cell[0], x % cell[1]], axis=-1).astype(np.uint8)
    before = image.copy()
    count = 24 if grid == 2 else 50
    views = views_of(("jigsaw", {"grid": grid, "tile": tile, "num_permutations": count}))
    rows, columns = cell if tile is None else (tile, tile)
    corners = set()
    for index in range(20):
        (out,) = views(image, 0, 0, index)
        assert out.shape == (grid * rows, grid * columns, 3)
        label = drawn_permutation(0, 0, index, 0, count)
        tiles = (
            out.reshape(grid, rows, grid, columns, 3).swapaxes(1, 2).reshape(-1, rows, columns, 3)
        )
        assert (tiles[..., 0] == permutations(grid**2, count)[label][:, None, None]).all()
        for one in tiles:
            top, left = one[0, 0, 1:].astype(int)
            assert (one[..., 1] == top + np.arange(rows)[:, None]).all()
            assert (one[..., 2] == left + np.arange(columns)).all()
            corners.add((top, left))
    room = cell[0] - rows, cell[1] - columns
    assert all(0 <= top <= room[0] and 0 <= left <= room[1] for top, left in corners)
    assert len(corners) == 1 if tile is None else len(corners) > 5
    assert np.max([*corners], axis=0).tolist() == [*room], "up to the end of both sides"
    assert np.array_equal(image, before)


def test_permutations_are_different_and_always_the_same() -> None:
    assert sorted(map(tuple, permutations(4, 24).tolist())) == list(
        itertools.permutations(range(4))
    )
    for tiles, count, least in ((9, 100, 6), (9, 1000, 5), (16, 100, 12)):
        chosen = permutations(tiles, count)
        assert (np.sort(chosen, axis=1) == np.arange(tiles)).all()
        distances = (chosen[:, None] != chosen).sum(axis=2)
        assert distances[np.triu_indices(count, 1)].min() >= least
    assert permutations(9, 100)[:3].tolist() == permutations(9, 1000)[:3].tolist()
    # a checkpoint's labels mean the same with any version of numpy
    assert zlib.crc32(permutations(9, 100).tobytes()) == 1148271178


def test_tiles_lie_anywhere_in_their_cells_and_the_tenth_is_in_the_first() -> None:
    """Cells of 12 x 16 pixels."""
    pipeline, draws = Compose([build("tile", size=10)]), rng()
    for number, cell in enumerate((*range(9), 0)):
        (tile,) = pipeline.for_view(number).transforms
        boxes = {tile.draw(draws, 36, 48) for _ in range(150)}
        left, top = cell % 3 * 16, cell // 3 * 12
        corners = itertools.product(range(left, left + 7), range(top, top + 3))
        assert boxes == {(x, y, x + 10, y + 10) for x, y in corners}


def test_jigsaw_says_what_is_too_small() -> None:
    with pytest.raises(UserError, match=r"48x36 pixels has cells of 16x12 in a grid of 3, .* 13;"):
        build("jigsaw", tile=13)(IMAGE, rng())


@pytest.mark.parametrize("keep", [1, 2])
def test_channel_drop(keep: int) -> None:
    transform, draws, n = build("channel_drop", keep=keep, fill=7, p=0.6), rng(), 1500
    kept = np.zeros(3)
    changed = 0
    for _ in range(n):
        out = transform(IMAGE, draws)
        same = (out == IMAGE).all(axis=(0, 1))
        assert ((out == 7).all(axis=(0, 1)) | same).all()
        if out is not IMAGE:
            assert same.sum() == keep
            kept += same
            changed += 1
    assert abs(changed / n - 0.6) < 5 * math.sqrt(0.24 / n)
    share = keep / 3
    assert (np.abs(kept / changed - share) < 5 * math.sqrt(share * (1 - share) / changed)).all()


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("rotate_90", {"k": []}, "k"),
        ("rotate_90", {"k": [4]}, "k"),
        ("jigsaw", {"grid": 2, "num_permutations": 25}, "num_permutations"),
    ],
)
def test_problems_name_the_key(name: str, args: dict[str, Any], key: str) -> None:
    problems = list(build(name, **args).problems({}))
    assert len(problems) == 1
    assert problems[0].startswith(f"{key}: ")
    assert list(build(name).problems({})) == []
