"""``selftask eval`` and ``features`` of a transformer: other image sizes, hidden layers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from shown import shown
from torch import Tensor

from selftask.cli.main import main
from selftask.cli.model.load_model import open_frozen
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.data.loading.open_data import open_data
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone


@pytest.fixture(scope="module")
def exported_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of 64 pixels as a run leaves it."""
    args = {"img_size": 64, "patch_size": 16, "depth": 2, "pool": "avg"}
    component = Component(name="vit_tiny", args=args)
    transforms = [
        {"name": "resize", "size": 80, "interpolation": "bilinear"},
        {"name": "center_crop", "size": 64},
        {"name": "normalize", "stats": "half", "mean": None, "std": None},
    ]
    meta = {"architecture": {"name": component.name, "args": args}, "transforms": transforms}
    return save_backbone(build_backbone(component), tmp_path_factory.mktemp("vit"), meta)


LARGER = "eval.transforms=[{name: center_crop, size: 96},{name: normalize, stats: half}]"


@pytest.mark.parametrize("command", ["eval", "features"])
def test_images_of_another_size_than_the_grid_s(
    command: str, exported_vit: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [str(exported_vit), f"data={images}", "data.max_unreadable=1", "train.device=cpu"]
    words = ["eval", "knn", *words, "k=[1]"] if command == "eval" else ["features", *words]
    words += [f"out={tmp_path / 'out'}"] if command == "features" else []
    assert main([*words, LARGER]) == 2
    printed = capsys.readouterr().err
    assert "images of 96x96 pixels, and the backbone (a VisionTransformer) takes those" in printed
    assert "of 64x64; image_size=96 interpolates its positions" in printed
    assert main([*words, "image_size=96"]) == 0
    assert "pos_embed is interpolated from (1, 17, 192) to (1, 37, 192)" in capsys.readouterr().err


def test_image_size_of_an_exported_file(exported_vit: Path, images: Path) -> None:
    frozen = open_frozen(str(exported_vit), [f"data={images}", "image_size=128"])
    assert [t.args.get("size") for t in frozen.config.eval.transforms] == [160, 128, None]
    assert frozen.facts["input_size"] == 128
    assert frozen.facts["architecture"]["args"]["img_size"] == 128
    small = open_frozen(str(exported_vit), [f"data={images}"]).backbone.pos_embed
    theirs = timm.layers.resample_abs_pos_embed(small, [8, 8], [4, 4], num_prefix_tokens=1)
    assert torch.allclose(frozen.backbone.pos_embed, theirs, rtol=0, atol=1e-6)


def test_image_size_of_a_library_s_model(images: Path) -> None:
    words = [f"data={images}", "weights=none", "image_size=64", "train.device=cpu"]
    frozen = open_frozen("timm:vit_tiny_patch16_224", words)
    assert frozen.backbone(torch.zeros(1, 3, 64, 64)).shape == (1, 192)
    assert [t.args.get("size") for t in frozen.config.eval.transforms] == [73, 64, None]
    with pytest.raises(UserError, match=r"patches of 16 pixels .*; try 96 or 112"):
        open_frozen(
            "timm:vit_tiny_patch16_224", [f"data={images}", "weights=none", "image_size=100"]
        )


def test_features_of_hidden_layers_and_their_clusters(
    exported_vit: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "features"
    monkeypatch.chdir(images.parent)
    words = [f"data={images.name}", f"out={out}", "data.max_unreadable=1", "train.device=cpu"]
    words += ["image_size=96", "layers=[0,-1]", "pool=both", "clusters=2", "rank=true"]
    assert main(["features", str(exported_vit), *words]) == 0
    backbone = open_frozen(str(exported_vit), [*words[:1], *words[2:5]]).backbone.eval()
    frozen = open_frozen(str(exported_vit), [*words[:1], *words[2:5]])
    with (out / "images.csv").open(newline="") as file:
        paths = [Path(row["path"]) for row in csv.DictReader(file)]
    seen: dict[int, Tensor] = {}
    last = len(backbone.blocks) - 1
    for number in (0, last):
        backbone.blocks[number].register_forward_hook(
            lambda module, args, output, number=number: seen.update({number: output})
        )
    with torch.no_grad():
        backbone(torch.stack([shown(frozen.config, path) for path in paths]))
    for number in (0, last):
        tokens = seen[number]
        expected = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
        actual = np.load(out / f"features_layer{number}.npy")
        assert np.allclose(actual, expected.numpy(), atol=1e-5)
    with (out / "clusters.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [Path(row["path"]) for row in table] == [path.absolute() for path in paths]
    labels = np.array([int(row["label"]) for row in table])
    assert set(labels) == {0, 1}, "two clusters, none of them empty"
    config = load_config("supervised/digits", [f"data={out / 'clusters.csv'}", "data.val=null"])
    source = open_data(config.data).train  # a data set with these labels
    assert [source[number][1] for number in range(len(source))] == labels.tolist()
    unit = actual.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    centroids = np.stack([unit[labels == label].sum(axis=0) for label in (0, 1)])
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    assert ((unit @ centroids.T).argmax(axis=1) == labels).all(), "of the nearest centroid"
    cosines = unit @ unit.T - 3 * np.eye(len(unit))  # no image is its own neighbor
    nearest = dict(zip(map(str, paths), cosines.max(axis=1), strict=True))
    with (out / "ranking.csv").open(newline="") as file:
        ranking = {row["path"]: float(row["cosine"]) for row in csv.DictReader(file)}
    assert ranking == pytest.approx(nearest, abs=2e-6)
    assert list(ranking.values()) == sorted(ranking.values()), "rare images first"


def test_evaluations_of_hidden_layers(
    exported_vit: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"data={images}", "data.max_unreadable=1", "train.device=cpu", "image_size=96"]
    assert main(["eval", "knn", str(exported_vit), *words, "k=[1]", "eval.layers=[0,1]"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    out = tmp_path / "features"
    assert main(["features", str(exported_vit), *words, f"out={out}", "layers=[0,1]"]) == 0
    capsys.readouterr()
    with (out / "images.csv").open(newline="") as file:
        folders = np.array([Path(line["path"]).parent.name for line in csv.DictReader(file)])
    for layer in (0, 1):  # each image by its nearest neighbor among the others
        unit = np.load(out / f"features_layer{layer}.npy").astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        nearest = (unit @ unit.T - 3 * np.eye(len(unit))).argmax(axis=1)
        expected = (folders[nearest] == folders).mean()
        assert row[f"knn_top1_layer{layer}"] == pytest.approx(expected)
    assert main(["eval", "knn", str(exported_vit), *words, "k=[1]", "eval.layers=[7]"]) == 2
    assert "eval.layers: 7; the backbone has layers 0 to" in capsys.readouterr().err
