"""``selftask export --to onnx``: ONNX Runtime computes the backbone's features, for any batch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selftask.cli.main import main
from selftask.config.schema import Component
from selftask.models.build import build_backbone
from selftask.models.weights.formats import onnx_file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "channels", "size"),
    [
        (Component(name="resnet18", args={"stem": "cifar"}), 1, 32),
        (Component(name="timm", args={"model": "vit_tiny_patch16_224"}), 3, None),
    ],
    ids=["resnet", "vit"],
)
def test_onnx_runtime_computes_the_same_features(
    backbone: Component, channels: int, size: int | None, tmp_path: Path
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = build_backbone(backbone, channels)
    facts = {"channels": channels, "input_size": size, "normalization": {"mean": [0.5]}}
    path = onnx_file.save_onnx(model, tmp_path, facts)
    assert model.training  # as it was
    session = runtime.InferenceSession(str(path))
    model.eval()
    for batch in (1, 3):
        images = torch.randn(batch, channels, size or 224, size or 224)
        (features,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(features), model(images), rtol=1e-4, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["selftask"]) == facts
    assert [file.name for file in tmp_path.iterdir()] == ["backbone.onnx"]


def error_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_module = importlib.util.find_spec

    def without_onnx(name: str, *more: Any) -> Any:
        return None if name.startswith("onnx") else find_module(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without_onnx)
    words = ["export", "torchvision:resnet18", "weights=none", "--to", "onnx"]
    message = error_line([*words, "--out", str(tmp_path)], capsys)
    assert "--to onnx needs onnx and onnxscript: pip install 'selftask[onnx]'" in message
    assert not [*tmp_path.iterdir()]


def test_more_weights_than_a_file_holds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_file, "_LIMIT", 1_000_000)
    monkeypatch.setattr(onnx_file, "check_onnx", lambda: None)
    words = ["export", "torchvision:resnet18", "weights=none", "--to", "onnx"]
    assert "one ONNX file holds 2 GB" in error_line([*words, "--out", str(tmp_path)], capsys)
