"""Groups of views that are made from others, on both engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data.both_engines import by_cpu, by_device
from selftask.config.load import load_config
from selftask.config.schema import Component, Config, ViewConfig, num_views
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import open_data
from selftask.data.views import Views
from selftask.distributed.world import World
from selftask.errors import ConfigError

IMAGES = [
    np.random.default_rng(n).integers(0, 256, (40 + n, 52 - n, 3), dtype=np.uint8) for n in range(3)
]


def part(name: str, **args: object) -> Component:
    return Component(name=name, args=args)


CROP = part("random_resized_crop", size=36)
JITTER = part("color_jitter", brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, p=0.8)
TILES = {
    "main": ViewConfig(count=2, transforms=[CROP, part("horizontal_flip")]),
    "small": ViewConfig(of="main", transforms=[part("resize", size=9)]),
    "tiles": ViewConfig(of="main", count=9, transforms=[part("tile")]),
}
HIDDEN = {
    "crop": ViewConfig(count=0, transforms=[CROP]),
    "whole": ViewConfig(of="crop", transforms=[]),
    "tiles": ViewConfig(of="crop", count=9, transforms=[part("tile", size=8), JITTER]),
}


def test_the_tiles_of_a_view_laid_out_again_are_the_view() -> None:
    made = Views(TILES)(IMAGES[0], 5, 1, 7)
    main, tiles = made[:2], made[4:]
    for view, own in zip(main, (tiles[:9], tiles[9:]), strict=True):
        rows = [np.concatenate(own[row : row + 3], axis=1) for row in (0, 3, 6)]
        assert np.array_equal(np.concatenate(rows), view)


def test_a_group_without_changes_shows_its_parents_view() -> None:
    views = {"a": TILES["main"], "b": ViewConfig(of="a", transforms=[])}
    first, second, *copies = Views(views)(IMAGES[1], 0, 0, 0)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, copies[0]) and np.array_equal(second, copies[1])


def test_a_group_of_no_views_is_made_for_others_alone() -> None:
    views = Views(HIDDEN)
    whole, *tiles = views(IMAGES[0], 0, 0, 0)
    assert len(views) == len(views.to_float) == 10
    assert whole.shape == (36, 36, 3) and {tile.shape for tile in tiles} == {(8, 8, 3)}
    plain = Views({**HIDDEN, "tiles": ViewConfig(of="crop", count=9, transforms=[part("tile")])})
    cells = plain(IMAGES[0], 0, 0, 0)[1:]
    rows = [np.concatenate(cells[row : row + 3], axis=1) for row in (0, 3, 6)]
    assert np.array_equal(np.concatenate(rows), whole)
    assert num_views(HIDDEN) == {"crop": 0, "whole": 1, "tiles": 9}


def test_groups_added_below_leave_the_draws_of_others_alone() -> None:
    alone = Views({"main": TILES["main"]})(IMAGES[0], 3, 2, 1)
    together = Views(TILES)(IMAGES[0], 3, 2, 1)
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=False))


BLURRED = {
    "main": TILES["main"],
    "blurred": ViewConfig(of="main", transforms=[part("gaussian_blur", p=1.0)]),
}
"""All on the device; TILES and HIDDEN need the worker for their tiles."""


@pytest.mark.parametrize(
    "config", [TILES, HIDDEN, BLURRED], ids=["shown", "hidden", "on the device"]
)
def test_both_engines_agree(config: dict[str, ViewConfig]) -> None:
    ours = by_device(config, IMAGES)
    cpu = by_cpu(config, IMAGES)
    assert len(ours) == len(cpu) == sum(num_views(config).values())
    for one, other in zip(ours, cpu, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().mean() * 255 < 0.6


def load(*overrides: str) -> Config:
    return load_config("simclr/digits", ["data.num_workers=0", "train.batch_size=8", *overrides])


@pytest.mark.parametrize("augment_on", ["cpu", "device"])
@pytest.mark.parametrize("workers", [0, 2])
def test_groups_keep_their_names_in_the_batch(
    augment_on: str, workers: int, tmp_path: Path
) -> None:
    config = load(
        "method=swav",
        "+views.parts.of=main",
        "+views.parts.count=4",
        "+views.parts.transforms=[{name: tile, grid: 2},{name: normalize, stats: half}]",
        f"data.augment_on={augment_on}",
        f"data.num_workers={workers}",
        f"out={tmp_path}",
    )
    module = DataModule(config, open_data(config.data), World(), torch.device("cpu"))
    try:
        batch = next(module.train_batches(0))
    finally:
        module.close()
    assert {name: len(views) for name, views in batch.views.items()} == {"main": 2, "parts": 8}
    for view, start in zip(batch.views["main"], (0, 4), strict=True):
        tiles = batch.views["parts"][start : start + 4]
        rows = [torch.cat(tiles[row : row + 2], dim=3) for row in (0, 2)]
        assert torch.allclose(torch.cat(rows, dim=2), view, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("of=man", r"views.parts.of='man': no such group; did you mean 'main'"),
        ("of=parts", r"views.parts.of='parts': a group can only be made from a group that stands"),
        ("count=0", r"views.parts.count=0: needs at least 1"),
    ],
)
def test_wrong_groups_are_reported_with_the_config(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("+views.parts.transforms=[normalize]", f"+views.parts.{override}")


def test_named_groups_of_a_method(forget_names: None) -> None:
    from selftask.methods.base import Method
    from selftask.registry import register_method

    @register_method("wants_groups")
    class WantsGroups(Method):
        """A method of named groups."""

        loss_reduction = "samples"
        views = {"main": 1, "tiles": (4, None)}

    with pytest.raises(ConfigError) as caught:
        load("method=wants_groups", "+views.parts.of=main", "+views.parts.transforms=[normalize]")
    said = str(caught.value)
    assert "views: wants_groups needs 1 view in group 'main', got 2" in said
    assert "views: wants_groups needs 4 views or more in group 'tiles', got 0" in said
    assert "views: wants_groups has no use for group 'parts'; " in said


def test_a_transform_that_never_changes_anything_is_left_out() -> None:
    """All strengths of color_jitter are 0 by default."""
    views = Views({"main": ViewConfig(transforms=[part("color_jitter"), part("resize", size=9)])})
    alone = Views({"main": ViewConfig(transforms=[part("resize", size=9)])})
    assert np.array_equal(views(IMAGES[0], 0, 0, 0)[0], alone(IMAGES[0], 0, 0, 0)[0])
