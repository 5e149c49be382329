"""``selftask eval linear`` of hidden layers: one probe for each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from selftask.cli.main import main
from selftask.config.schema import Component
from selftask.evaluate.features import Features
from selftask.evaluate.linear import Linear
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A transformer of 32 pixels as a run leaves it."""
    torch.manual_seed(0)
    args = {"img_size": 32, "patch_size": 16, "depth": 2, "pool": "avg"}
    component = Component(name="vit_tiny", args=args)
    meta = {
        "architecture": {"name": component.name, "args": args},
        "transforms": [{"name": "normalize", "stats": "half", "mean": None, "std": None}],
    }
    backbone = build_backbone(component)
    for parameter in backbone.blocks[1].parameters():
        torch.nn.init.normal_(parameter)  # far from the layer before it
    return save_backbone(backbone, tmp_path / "export", meta)


@pytest.fixture
def sets(tmp_path: Path) -> list[Path]:
    """Twenty training and twenty test images; the second of two classes is a little brighter."""
    draws = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / ("train", "val")[number // 20] / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        small = draws.integers(0, 200, (6, 6, 3)) + 20 * (number % 2)
        picture = Image.fromarray(small.astype(np.uint8)).resize((32, 32))
        picture.save(folder / f"{number:02}.png")
    return [tmp_path / "train", tmp_path / "val"]


def test_each_layer_has_its_own_linear_probe(
    exported: Path, sets: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each beside a probe of the saved features of that layer."""
    words = [str(exported), "train.device=cpu", "data.num_workers=0"]
    data = [f"data={sets[0]}", f"data.val={sets[1]}"]
    assert main(["eval", "linear", *words, *data, "eval.layers=[0,1]"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    for folder in sets:
        out = tmp_path / f"features_{folder.name}"
        assert main(["features", *words, f"data={folder}", f"out={out}", "layers=[0,1]"]) == 0
    targets = torch.arange(20) // 10
    for layer in (0, 1):
        saved = [tmp_path / f"features_{f.name}" / f"features_layer{layer}.npy" for f in sets]
        parts = [
            Features(torch.from_numpy(np.load(path)), targets, torch.arange(20)) for path in saved
        ]
        assert row[f"linear_top1_layer{layer}"] == pytest.approx(Linear()(*parts)["linear_top1"])
    assert row["linear_top1_layer0"] != row["linear_top1_layer1"], "else they may be exchanged"
