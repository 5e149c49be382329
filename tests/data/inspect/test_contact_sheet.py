"""``selftask data show``: the sheet shows what training gets, pixel by pixel."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.odd_files import make_photographs
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.data_module import DataModule
from selftask.data.inspect.contact_sheet import Row, draw, rows_of, view_names
from selftask.data.loading.open_data import open_data
from selftask.distributed.world import World

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # ImageNet's
VIEWS = (
    "views={global: {count: 2, transforms: [{name: random_resized_crop, size: 20}, "
    "horizontal_flip, {name: normalize, stats: imagenet}]}, local: {count: 1, transforms: "
    "[{name: random_resized_crop, size: 12}, {name: normalize, mean: [0, 0, 0], std: [1, 1, 1]}]}}"
)


def config_for(folder: Path, *more: str) -> Config:
    training = "train={batch_size: 5, epochs: 1, seed: 3, device: cpu}"
    data = [f"data={folder}", "data.num_workers=0", f"out={folder / 'out'}"]
    return load_config("dino/images", [*data, training, VIEWS, *more])


def test_the_rows_are_what_training_gets(tmp_path: Path) -> None:
    make_photographs(tmp_path, 20)
    config = config_for(tmp_path)
    sources = open_data(config.data)
    rows = rows_of(config, sources, 8)
    feed = DataModule(config, sources, World(), torch.device("cpu"))
    shown = {}
    for batch in itertools.islice(feed.train_batches(0), 2):
        for place, index in enumerate(batch.index.tolist()):
            views = [view[place].permute(1, 2, 0).double().numpy() for view in batch.all_views]
            pixels = [views[0] * STD + MEAN, views[1] * STD + MEAN, views[2]]
            shown[sources.train.path(index)] = [np.rint(255 * view) for view in pixels]
    assert len(rows) == 8
    assert len({row.name for row in rows}) == 8
    for row in rows:
        assert np.array_equal(row.original, np.asarray(Image.open(row.name))), row.name
        assert [view.shape for view in row.views] == [(20, 20, 3), (20, 20, 3), (12, 12, 3)]
        for view, expected in zip(row.views, shown[row.name], strict=True):
            assert np.array_equal(view, expected), row.name
    assert view_names(config.views) == ["global 1", "global 2", "local"]
    assert not (tmp_path / "out").exists(), "a run's folder is left alone"


def test_other_draws_with_another_seed(tmp_path: Path) -> None:
    make_photographs(tmp_path, 6)
    config = config_for(tmp_path)
    other = config_for(tmp_path, "train.seed=4")
    rows, others = (
        {row.name: row.views for row in rows_of(c, open_data(c.data), 6)} for c in (config, other)
    )
    assert rows.keys() == others.keys()
    assert any(not np.array_equal(rows[name][0], others[name][0]) for name in rows)


def test_views_that_the_device_makes(tmp_path: Path) -> None:
    """The same crops, but for rounding."""
    make_photographs(tmp_path, 4)
    here, there = (
        rows_of(config, open_data(config.data), 4)
        for config in (
            config_for(tmp_path),
            config_for(tmp_path, "data.augment_on=device", "data.cache=device"),
        )
    )
    for row, other in zip(here, there, strict=True):
        assert row.name == other.name
        for view, same in zip(row.views, other.views, strict=True):
            assert np.abs(view.astype(int) - same.astype(int)).mean() < 2


def test_bad_images_are_replaced_as_in_training(tmp_path: Path) -> None:
    make_photographs(tmp_path, 3)
    for number in range(3):
        (tmp_path / f"bad{number}.jpg").write_bytes(b"no image")
    config = config_for(tmp_path, "data.on_error=fail")
    rows = rows_of(config, open_data(config.data), 100)
    assert len(rows) == 6
    assert not any(Path(row.name).name.startswith("bad") for row in rows)


def test_the_sheet_holds_every_picture(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        Row(
            f"{'long/' * 100}{number}\n.jpg",
            rng.integers(0, 200, (70 + 10 * number, 90, 3), dtype=np.uint8),
            [rng.integers(0, 200, (size, size, 3), dtype=np.uint8) for size in (128, 32)],
        )
        for number in range(2)
    ]
    sheet = np.asarray(draw(rows, ["global", "local 1"]))
    for row in rows:
        small = row.views[1].repeat(3, axis=0).repeat(3, axis=1)  # 32 pixels become 96
        large = row.original.repeat(2, axis=0).repeat(2, axis=1)
        for picture in (large, row.views[0], small):
            assert _holds(sheet, picture), picture.shape


def _holds(sheet: np.ndarray, picture: np.ndarray) -> bool:
    height, width = picture.shape[:2]
    inside = sheet[: -height + 1, : -width + 1]
    corners = (inside == picture[0, 0]).all(axis=2)
    corners &= (sheet[height - 1 :, width - 1 :] == picture[-1, -1]).all(axis=2)
    return any(
        np.array_equal(sheet[top : top + height, left : left + width], picture)
        for top, left in zip(*np.nonzero(corners), strict=True)
    )


def test_the_command_writes_a_png(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_photographs(tmp_path / "images", 4)
    out = tmp_path / "sheet.png"
    argv = ["simclr/images", f"data={tmp_path / 'images'}", "--images=3", "--out", str(out)]
    assert main(["data", "show", *argv, "data.val=no/such/folder"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == f"SHOW wrote {out}: 3 images with 2 views of 96x96 (seed 0, epoch 0)"
    with Image.open(out) as sheet:
        assert sheet.format == "PNG"
        assert sheet.width > 3 * 96


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "needs a RECIPE"),
        (["data=x"], "needs a RECIPE"),
        (["simclr/digits", "--images", "0"], "--images 0"),
        (["simclr/digits", "--out", "views.jpg"], "must end with .png"),
        (["simclr/digits", "--out", "no/such/views.png"], "there is no folder"),
        (["simclr/digits", "--image", "3"], "did you mean '--images'?"),
        (["simclr/digit"], "simclr/digits"),
        (["simclr/images"], "data"),
    ],
)
def test_bad_arguments_of_data_show_are_refused(
    argv: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", *argv]) == 2
    error = capfd.readouterr().err
    assert said in error
    assert "Traceback" not in error
