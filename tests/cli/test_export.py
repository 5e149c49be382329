"""``selftask export``: what it writes is what the library's own model loads."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import nn

from selftask.cli.main import main
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.weights.export import check_library
from selftask.models.weights.model_source import open_model


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize("backbone", ["resnet18", "torchvision:resnet18", "timm:resnet18"])
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_resnet_is_one_of_either_library(backbone: str, library: str) -> None:
    """Once refused: "--to timm: this backbone is a model of torchvision"."""
    name, _, model = backbone.partition(":")
    component = Component(name=name, args={"model": model, "args": {}} if model else {})
    check_library(build_backbone(component), component, 3, library)


@pytest.mark.parametrize(
    ("component", "library", "message"),
    [
        (Component(name="resnet18", args={"stem": "cifar"}), "timm", "size mismatch for conv1.wei"),
        (Component(name="resnet18", args={"stem": "cifar"}), "torchvision", "does not load these"),
        (Component(name="small_resnet"), "timm", "--to timm: timm has no model named 'small_res"),
        (
            Component(name="torchvision", args={"model": "vgg11", "args": {}}),
            "timm",
            "its vgg11 does not load these weights: Missing key",
        ),
    ],
)
def test_what_the_library_does_not_load_is_refused(
    component: Component, library: str, message: str
) -> None:
    with pytest.raises(UserError, match=f"export: .*{message}"):
        check_library(build_backbone(component), component, 3, library)


def test_a_model_that_computes_something_else_is_refused() -> None:
    """timm's resnet18 loads these, and has another activation."""
    component = Component(name="resnet18")
    backbone = build_backbone(component)
    backbone.relu = nn.GELU()
    with pytest.raises(UserError, match="computes other features"):
        check_library(backbone, component, 3, "timm")


def test_of_a_vissl_file_for_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = torchvision.models.resnet18()
    theirs.fc = nn.Identity()
    trunk = {f"_feature_blocks.{key}": value for key, value in theirs.state_dict().items()}
    model = {"trunk": trunk, "heads": {"0.clf.0.weight": torch.zeros(8, 512)}}
    torch.save({"classy_state_dict": {"base_model": {"model": model}}}, tmp_path / "vissl.torch")
    words = ["torchvision:resnet18", f"weights={tmp_path / 'vissl.torch'}", "--to", "timm"]
    assert main(["export", *words]) == 2
    assert (
        error_line(capsys) == "error: export: of a model that no run made, --out DIR says where to"
    )
    assert main(["export", *words, "--out", str(tmp_path / "out")]) == 0
    ours = timm.create_model("resnet18", num_classes=0)
    ours.load_state_dict(torch.load(tmp_path / "out" / "backbone.pt"), strict=True)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


def test_a_name_gets_the_hash_that_torch_hub_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "timm:resnet10t", "weights=none", "--out", str(tmp_path / "out")]
    assert main([*words, "--name", "mine"]) == 0
    path = Path(capsys.readouterr().out.strip())
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    assert {file.name for file in path.parent.iterdir()} == {
        f"mine-{digits}.{kind}" for kind in ("pt", "safetensors", "json")
    }
    load = partial(torch.hub.load_state_dict_from_url, model_dir=str(tmp_path), check_hash=True)
    state = load(path.as_uri())
    backbone, _ = open_model(str(path))
    backbone.load_state_dict(state, strict=True)
    wrong = path.rename(path.with_name("mine-12345678.pt"))
    with pytest.raises(RuntimeError, match="invalid hash value"):
        load(wrong.as_uri())
    for more in (["--name", "a/b"], ["--name", "mine", "--to", "onnx"]):
        assert main([*words, *more]) == 2
        assert error_line(capsys).endswith("is for backbone.pt, and a name without folders")


def test_only_a_run_has_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "timm:resnet18", "weights=none", "--to", "checkpoint"]) == 2
    assert "timm:resnet18 is no run" in error_line(capsys)
