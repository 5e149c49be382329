"""Checkpoints of VISSL and detectron2: read as they are, and written by ``selftask export``."""

from __future__ import annotations

import logging
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from written_files import State, prefixed, resnet, to_detectron2, write, zeroed

from selftask.cli.model import export
from selftask.errors import UserError
from selftask.models.weights.load import load_weights
from selftask.models.weights.read import read_state


@pytest.fixture
def vissl(monkeypatch: pytest.MonkeyPatch) -> type:
    """VISSL's AttrDict, which stands in its checkpoints, for as long as one is written."""
    module = ModuleType("vissl.config.attr_dict")
    kind = type("AttrDict", (dict,), {"__module__": module.__name__})
    module.AttrDict = kind  # type: ignore[attr-defined]
    for name in ("vissl", "vissl.config"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kind


class VisslTrunk(nn.Module):
    """VISSL's ResNet: torchvision's layers in a ModuleDict, called one after the other."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        blocks = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        names = {name: getattr(model, name) for name in (*blocks, "avgpool")}
        names["conv1_relu"] = names.pop("relu")
        order = ("conv1", "bn1", "conv1_relu", *blocks[3:], "avgpool")
        self._feature_blocks = nn.ModuleDict({name: names[name] for name in order})

    def forward(self, images: Tensor) -> Tensor:
        for block in self._feature_blocks.values():
            images = block(images)
        return images.flatten(1)


def vissl_checkpoint(trunk: State, attr_dict: type) -> dict[str, Any]:
    """All of VISSL's keys (vissl/utils/checkpoint.py), with a MoCo teacher in its loss."""
    heads = {f"0.clf.{layer}.{kind}": torch.ones(3) for layer in (0, 2) for kind in ("weight",)}
    teacher = prefixed("moco_encoder.trunk.", zeroed(trunk))
    loss = {**teacher, "queue": torch.zeros(2, 3)}
    return {
        "phase_idx": 99,
        "iteration": 250_000,
        "loss": loss,
        "iteration_num": 9,
        "train_phase_idx": 99,
        "classy_state_dict": {
            "train": True,
            "base_model": {
                "model": {"trunk": trunk, "heads": heads},
                "meta": {"trunk": {}, "heads": []},
            },
            "meters": [],
            "optimizer": {
                "optim": {"state": {0: {"momentum_buffer": torch.zeros(4)}}, "param_groups": []},
                "parameters": attr_dict({"lr": 0.03, "name": "sgd"}),
            },
            "num_updates": 320_000.0,
            "losses": [7.1, 7.0],
            "hooks": {},
            "loss": loss,
        },
        "type": "consolidated",
    }


@pytest.mark.parametrize("suffix", [".torch", ".pth"])  # torch's format before 1.6, and since
def test_a_vissl_checkpoint_as_it_is(
    vissl: type, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = VisslTrunk(resnet("resnet50")).eval()
    for part in theirs.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
    path = tmp_path / f"model_final_checkpoint_phase99{suffix}"
    write(vissl_checkpoint(dict(theirs.state_dict()), vissl), path)
    for name in [name for name in sys.modules if name.startswith("vissl")]:
        del sys.modules[name]  # whoever reads it has no VISSL

    ours = resnet("resnet50").eval()
    with caplog.at_level(logging.INFO, logger="selftask"):
        load_weights(ours, read_state(path), what="w")
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours(images), theirs(images))
    assert "python objects (vissl.config.attr_dict.AttrDict), which are not lo" in caplog.text
    assert "w: 318/318 tensors" in caplog.text
    assert "classy_state_dict.base_model.model.heads (2 tensors)" in caplog.text


def test_export_to_detectron2_and_vissl(tmp_path: Path) -> None:
    """Through the command; the reference is the rule of the converters above."""
    state = dict(resnet().state_dict())
    torch.save(state, tmp_path / "w.pth")
    for layout in ("detectron2", "vissl"):
        words = ["torchvision:resnet18", f"weights={tmp_path / 'w.pth'}", "--to", layout]
        assert export.main([*words, "--out", str(tmp_path)]) == 0
    written = pickle.loads((tmp_path / "detectron2.pkl").read_bytes())
    assert written["matching_heuristics"] is True
    expected = {
        key.removeprefix("backbone.bottom_up."): value
        for key, value in to_detectron2(state).items()
    }
    assert written["model"].keys() == expected.keys()
    assert all(np.array_equal(written["model"][key], value) for key, value in expected.items())
    base = torch.load(tmp_path / "vissl.torch", weights_only=True)["classy_state_dict"]
    trunk = base["base_model"]["model"]["trunk"]
    assert trunk.keys() == {f"_feature_blocks.{key}" for key in state}
    for name in ("detectron2.pkl", "vissl.torch"):
        fresh = resnet()
        load_weights(fresh, read_state(tmp_path / name), what=name)
        assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    words = ["timm:vit_tiny_patch16_224", "weights=none", "--to", "vissl", f"--out={tmp_path}"]
    with pytest.raises(UserError, match=r"--to vissl is for ResNets .* not for a VisionTransf"):
        export.main(words)
    words[0] = "timm:resnet10t"  # a stem of three convolutions, and a pool before each shortcut
    with pytest.raises(UserError, match=r"not for a ResNet, which has 'conv1\.0\.weight'"):
        export.main(words)


def test_arrays_in_a_plain_pickle(tmp_path: Path) -> None:
    """The zoo of detectron2 is made of these; arrays of objects are none."""
    model = resnet()
    arrays = {key: value.numpy() for key, value in to_detectron2(dict(model.state_dict())).items()}
    more = {"__author__": "Caffe2", "names": np.array(["a", None], dtype=object)}
    write({"model": arrays, **more}, tmp_path / "R-18.pkl")
    fresh = resnet()
    load_weights(fresh, read_state(tmp_path / "R-18.pkl"))
    assert torch.equal(
        fresh.state_dict()["layer2.0.downsample.1.bias"], model.layer2[0].downsample[1].bias
    )
    assert torch.equal(fresh.layer4[1].conv2.weight, model.layer4[1].conv2.weight)


def test_a_vissl_regnet(vissl: type, tmp_path: Path) -> None:
    """Classy Vision's model, as VISSL takes it apart, gives the features of torchvision's."""
    from classy_vision.models import build_model

    theirs = build_model({"name": "regnet_y_400mf", "heads": []}).eval()
    blocks = {"conv1": theirs.stem}
    for block in theirs.trunk_output.children():
        blocks[f"res{len(blocks) + 1}"] = block
    trunk = nn.Module()
    trunk._feature_blocks = nn.ModuleDict(blocks)
    write(vissl_checkpoint(dict(trunk.state_dict()), vissl), tmp_path / "w.pth")
    ours = resnet("regnet_y_400mf").eval()
    load_weights(ours, read_state(tmp_path / "w.pth"))
    images = torch.randn(2, 3, 64, 64)
    expected = theirs.trunk_output(theirs.stem(images)).mean(dim=(2, 3))
    torch.testing.assert_close(ours(images), expected)
