"""``selftask export``: what it writes is what the library's own model loads."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import nn

import selftask
from selftask.cli.main import main
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.weights.export import check_library
from selftask.models.weights.formats.huggingface import (
    describe_for_huggingface,
    preprocessing_problem,
    save_huggingface,
)
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
        (Component(name="small_resnet"), "timm", "named 'small_resnet'; --to safetensors"),
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
    assert error_line(capsys).startswith("error: export: --out DIR is missing; only a run")
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
        assert error_line(capsys).endswith("only, and must not contain a folder")


@pytest.mark.parametrize(
    ("name", "args", "channels"),
    [
        ("resnet18", {}, 1),
        ("timm", {"model": "vit_tiny_patch16_224", "args": {"img_size": 32, "depth": 2}}, 3),
        ("vit_micro", {"registers": 2, "pool": "avg", "layer_scale": 0.1}, 3),
        ("vit_micro", {"positions": "rope", "swiglu": True, "layer_scale": 0.1}, 3),
        ("vit_micro", {"positions": "rope_eva", "img_size": 64}, 1),
    ],
)
def test_transformers_and_timm_load_it_from_a_folder(
    name: str, args: dict[str, Any], channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel

    backbone: Any = build_backbone(Component(name=name, args=args), channels)
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.1)
    size = args.get("img_size", 32)
    facts: dict[str, Any] = {"architecture": {"name": name, "args": args}, "channels": channels}
    facts["input_size"] = size
    folder = save_huggingface(backbone, tmp_path, describe_for_huggingface(backbone, facts))
    images = torch.randn(2, channels, size, size)
    expected = backbone.eval()(images)
    model = AutoModel.from_pretrained(folder).eval()
    torch.testing.assert_close(model(images).pooler_output, expected, rtol=1e-4, atol=1e-5)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)


def test_the_processor_does_what_the_transforms_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoImageProcessor

    words = ["export", "timm:resnet10t", "weights=none", "--to", "huggingface"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    image = cv2.resize(np.eye(4, 6, dtype=np.uint8)[..., None] * [90, 160, 250.0], (400, 300))
    image = image.astype(np.uint8)
    transform = selftask.load(tmp_path / "backbone.pt").transform
    shown = AutoImageProcessor.from_pretrained(folder)(Image.fromarray(image), return_tensors="pt")[
        "pixel_values"
    ][0]
    torch.testing.assert_close(shown, transform(image), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([{"name": "resize", "size": 72}, {"name": "center_crop", "size": 64}], None),
        ([], "images of other sizes than 224 are resized; in eval.transforms they are not"),
        ([{"name": "resize", "size": 64}], "and eval.transforms has resize"),
        ([{"name": "resize", "size": 48}, {"name": "center_crop", "size": 64}], "has resize, cen"),
        ([{"name": "center_crop", "size": 96}, {"name": "resize", "size": 64}], "center_crop, re"),
    ],
)
def test_other_preprocessing_is_warned_of(
    transforms: list[dict[str, Any]], message: str | None
) -> None:
    sizes = [transform["size"] for transform in transforms]
    facts: dict[str, Any] = {"architecture": {"name": "resnet18", "args": {}}}
    facts |= {"transforms": [*transforms, {"name": "normalize"}], "input_size": [None, *sizes][-1]}
    backbone = build_backbone(Component(name="resnet18"))
    problem = preprocessing_problem(describe_for_huggingface(backbone, facts))
    assert problem is None if message is None else message in (problem or "")


def test_a_fixed_size_of_the_model_is_that_of_its_images() -> None:
    """Once an AssertionError of timm, for images of 224 pixels."""
    args = {"img_size": 48, "patch_size": 8}
    facts: dict[str, Any] = {"architecture": {"name": "vit_micro", "args": args}, "transforms": []}
    backbone = build_backbone(Component(name="vit_micro", args=args))
    config = describe_for_huggingface(backbone, {**facts, "input_size": 32})
    assert config["pretrained_cfg"]["input_size"] == [3, 48, 48]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("small_resnet", {}, "only backbones timm:NAME, .* and this is small_resnet; --to safet"),
        ("resnet18", {"stem": "cifar"}, "timm's resnet18 does not load these weights: size mism"),
        ("vit_micro", {"swiglu": True}, "timm has no named model with backbone.swiglu: true"),
        ("vit_micro", {"positions": "rope_capi"}, "named model with backbone.positions: rope_capi"),
        ("vit_micro", {"positions": "rope"}, "backbone.positions: rope without layer_scale"),
        ("torchvision", {"model": "googlenet", "args": {}}, "timm has no model named 'googlenet"),
    ],
)
def test_what_transformers_cannot_load_is_refused(
    name: str, args: dict[str, Any], message: str
) -> None:
    backbone = build_backbone(Component(name=name, args=args))
    with pytest.raises(UserError, match=f"export: --to huggingface: .*{message}"):
        describe_for_huggingface(backbone, {"architecture": {"name": name, "args": args}})


def test_only_a_run_has_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "timm:resnet18", "weights=none", "--to", "checkpoint"]) == 2
    assert "needs a run, and timm:resnet18 is none" in error_line(capsys)


def test_the_export_of_another_run_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "other"
    run.mkdir()
    for name in ("config.yaml", "status.json"):
        (run / name).touch()
    for out in (run, run / "export"):
        assert main(["export", "timm:resnet18", "weights=none", "--out", str(out)]) == 2
        assert f"{run} is another run; name another folder" in error_line(capsys)
