"""Views and features of images that are not red, green and blue squares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import tiny
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import open_data
from selftask.data.source import channels_of
from selftask.models.build import build_backbone
from selftask.report.images.embedding_map import Projection, map_section
from selftask.report.images.gather import gather
from selftask.report.images.neighbors import neighbors_section
from selftask.report.images.projections import pca
from selftask.report.images.views import views_of

NORMALIZE = {"name": "normalize", "stats": "half"}
CROP = [{"name": "random_resized_crop", "size": 24}, NORMALIZE]
FIT = [{"name": "resize", "size": 20}, {"name": "center_crop", "size": 20}, NORMALIZE]


def bands(folder: Path, channels: int) -> Config:
    """Plates of some channels, 30 x 50 pixels, without labels."""
    images = folder / "plates"
    images.mkdir()
    draws = np.random.default_rng(0)
    for number in range(20):
        np.save(images / f"{number:02}.npy", draws.integers(0, 255, (30, 50, channels), np.uint8))
    data = {"name": "bands", "path": str(images), "value_range": [0, 255], "val": None}
    return recipe(folder, "simclr", {**data, "num_workers": 0})


def gray(folder: Path) -> Config:
    """Gray photographs of different sizes, one of which is damaged."""
    for number in range(20):
        kind = folder / "gray" / f"kind_{number % 2}"
        kind.mkdir(parents=True, exist_ok=True)
        pixels = np.full((40 + number, 90 - number), 10 * number, np.uint8)
        Image.fromarray(pixels).save(kind / f"{number:02}.png")
    (folder / "gray" / "kind_0" / "99.png").write_bytes(b"\x89PNG no image")
    return recipe(
        folder,
        "simclr",
        {"name": "folder", "path": str(folder / "gray"), "val": None, "num_workers": 0},
    )


def recipe(folder: Path, method: str, data: dict[str, object]) -> Config:
    config = {
        "defaults": [f"/{method}/digits", "_self_"],
        "data": data,
        "views": {"main": {"transforms": CROP}},
        "eval": {"transforms": FIT},
        "train": {"batch_size": 8, "device": "cpu"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return load_config(str(path), [f"out={folder / 'run'}", "backbone.width=8"])


@pytest.mark.parametrize("kind", ["5", "2", "1", "gray"])
def test_images_of_any_kind(kind: str, tmp_path: Path) -> None:
    config = gray(tmp_path) if kind == "gray" else bands(tmp_path, int(kind))
    sources = open_data(config.data)
    channels = channels_of(sources.train)
    shown = views_of(config, sources).html
    assert shown.count("<figure class=sample>") == 6
    said = {5: "channels 0 to 2 as red", 2: "channel 0 in gray", 1: "channel 0 in gray", 3: ""}
    assert said[channels] in shown

    results: list[str] = []
    actual = gather(
        build_backbone(config.backbone, channels),
        config,
        sources.train,
        what="training images",
        count=100,
        device=torch.device("cpu"),
        tell=results.append,
    )
    images = actual.images
    assert len(images) == 20, "the damaged one is left out"
    assert actual.inputs.shape == (len(actual.shown), channels, 20, 20)
    assert len(actual.shown) >= 7, "eight are drawn, one of which may be the damaged one"
    assert (images.labels >= 0).any() == (kind == "gray")
    for row, pixels in zip(actual.shown, actual.pixels, strict=True):
        assert np.array_equal(images.thumbnails[row][::4, ::4, 0], pixels[..., 0])
    projections = {"pca": Projection("PCA", pca(images.features, 2)[0])}
    for section in (neighbors_section(images, actual.shown), map_section(images, projections)):
        assert "data:image" in section.html
        assert ("✓" in section.html) == (kind == "gray" and section.id == "neighbors")


def test_captions_are_beside_their_images(tmp_path: Path) -> None:
    config = tiny.config("clip", tmp_path)
    html = views_of(config, open_data(config.data)).html
    assert html.count("<q>") == 6 and "in writing" in html


def test_pairs_show_both_images(tmp_path: Path) -> None:
    """Views of a second image of the sample, under the name of their group."""
    arrays = {
        "images": np.zeros((12, 16, 16, 3), np.uint8),
        "later": np.full((12, 16, 16, 3), 250, np.uint8),
    }
    np.savez(tmp_path / "pairs.npz", **arrays)
    path = tmp_path / "recipe.yaml"
    views = {"now": {"transforms": CROP}, "then": {"image": "later", "transforms": CROP}}
    content = {
        "defaults": ["/simclr/digits", "_self_"],
        "data": {
            "name": "array",
            "path": str(tmp_path / "pairs.npz"),
            "extras": ["later"],
            "val": None,
        },
        "views": {"main": None, **views},
        "train": {"batch_size": 8, "device": "cpu"},
        "eval": {"evaluations": None},
    }
    path.write_text(yaml.safe_dump(content))
    config = load_config(str(path), [f"out={tmp_path / 'run'}", "data.num_workers=0"])
    html = views_of(config, open_data(config.data)).html
    assert html.count("<small>now</small>") == html.count("<small>then</small>") == 6
