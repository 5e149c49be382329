"""Backbones: shapes, the libraries' own keys, messages for what cannot be built."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.backbones.norms import GhostBatchNorm2d
from selftask.models.build import build_backbone, check_offers, embed_dim, with_embed_dim
from selftask.models.weights.load import load_weights
from selftask.registry import (
    BACKBONES,
    HEAD_BLOCKS,
    OPTIMIZERS,
    SCHEDULES,
    Registry,
    register_backbone,
)

SMALL_SWIN = {"img_size": 32, "window_size": 4, "depths": [1, 1], "num_heads": [3, 6]}

SMALL_BEIT = {"img_size": 32, "depth": 2, "embed_dim": 48}


def _build(name: str, **args: object) -> nn.Module:
    return build_backbone(Component(name=name, args=dict(args)))


@pytest.mark.parametrize(
    ("name", "args", "size", "dim"),
    [
        ("small_resnet", {}, 32, 128),
        ("small_resnet", {"width": 8, "blocks": 2, "stem_stride": 1}, 32, 32),
        ("resnet18", {"stem": "cifar"}, 32, 512),
        ("resnet50", {"zero_init_residual": True}, 64, 2048),
        ("vit_tiny", {"img_size": 32, "patch_size": 4, "depth": 2}, 32, 192),
        (
            "vit_tiny",
            {"img_size": 32, "patch_size": 8, "depth": 1, "dynamic_img_size": True},
            16,
            192,
        ),
        ("timm", {"model": "vit_tiny_patch16_224", "args": {"img_size": 32, "depth": 1}}, 32, 192),
        ("timm", {"model": "swin_tiny_patch4_window7_224", "args": SMALL_SWIN}, 32, 192),
        ("timm", {"model": "resnet18"}, 32, 512),
        ("timm", {"model": "skresnet18"}, 32, 512),
        ("torchvision", {"model": "resnext50_32x4d"}, 32, 2048),
        ("torchvision", {"model": "mobilenet_v3_small"}, 32, 576),
        ("torchvision", {"model": "vit_b_16", "args": {"image_size": 48}}, 48, 768),
        ("torchvision", {"model": "efficientnet_b0"}, 32, 1280),
        ("torchvision", {"model": "regnet_y_400mf"}, 32, 440),
        ("timm", {"model": "xcit_nano_12_p16_224", "args": {"depth": 2}}, 32, 128),
        ("timm", {"model": "convit_tiny", "args": {"img_size": 32, "depth": 2}}, 32, 192),
        ("timm", {"model": "beit_base_patch16_224", "args": SMALL_BEIT}, 32, 48),
        ("timm", {"model": "convnext_atto", "args": {"depths": [1, 1, 1, 1]}}, 32, 320),
    ],
)
def test_maps_images_to_embed_dim_features(name: str, args: dict, size: int, dim: int) -> None:
    backbone = _build(name, **args)
    assert embed_dim(backbone) == dim
    assert backbone(torch.randn(2, 3, size, size)).shape == (2, dim)
    assert all(module.training for module in backbone.modules())


@pytest.mark.parametrize(
    ("name", "args", "size"),
    [
        ("small_resnet", {"width": 8}, 32),
        ("resnet18", {}, 32),
        ("resnet18", {"stem": "cifar"}, 8),
        ("vit_micro", {"depth": 1}, 32),
        ("timm", {"model": "vit_tiny_patch16_224", "args": {"img_size": 32, "depth": 1}}, 32),
        ("torchvision", {"model": "mobilenet_v3_small"}, 32),
        ("custom", {"model": f"{__name__}:of_any_channels"}, 8),
    ],
)
@pytest.mark.parametrize("channels", [1, 13])
def test_images_of_any_number_of_channels(name: str, args: dict, size: int, channels: int) -> None:
    torch.manual_seed(0)
    backbone = build_backbone(Component(name=name, args=args), channels)
    images = torch.randn(8, channels, size, size, requires_grad=True)
    features = backbone.eval()(images)
    assert features.shape == (8, embed_dim(backbone)) and features.std() > 0
    features.square().sum().backward()
    assert images.grad is not None and (images.grad.abs().amax(dim=(0, 2, 3)) > 0).all()


def of_any_channels(channels: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_new_first_convolution_is_as_strong_as_the_old() -> None:
    """Sums over 13 channels vary as sums over 3 do."""
    stem = {}
    for channels in (3, 13):
        torch.manual_seed(0)
        component = Component(name="torchvision", args={"model": "mobilenet_v3_small"})
        first: nn.Module = build_backbone(component, channels).features[0][0]  # type: ignore
        stem[channels] = first(torch.randn(8, channels, 32, 32)).std().item()
    assert stem[13] == pytest.approx(stem[3], rel=0.1)


def test_a_backbone_that_only_takes_three_channels_says_so() -> None:
    @dataclass
    class Plain:
        def build(self) -> nn.Module:
            return of_any_channels()

    register_backbone("plain_three")(Plain)
    assert embed_dim(build_backbone(Component(name="plain_three"))) == 4
    with pytest.raises(UserError, match="'plain_three' takes 3 channels, the data have 13: its bu"):
        build_backbone(Component(name="plain_three"), 13)
    args = {"model": "resnet18", "args": {"in_chans": 4}}
    with pytest.raises(UserError, match=r"in_chans: 4, the data have 13 channels"):
        build_backbone(Component(name="timm", args=args), 13)


@pytest.mark.parametrize(
    ("registry", "result"),
    [
        (BACKBONES, r"build\(self, channels=3\)"),
        (HEAD_BLOCKS, r"build\(self, width, num_classes\)"),
        (OPTIMIZERS, r"build\(self, groups\)"),
        (SCHEDULES, r"curve\(self, start, end, span\)"),
    ],
)
def test_a_function_where_a_class_with_build_is_registered(registry: Registry, result: str) -> None:
    here = rf"\(of_any_channels at {re.escape(__file__)}:\d+\)"
    expected = rf"'by_function' {here} is a function without a method `\w+`; register .*{result}"
    with pytest.raises(UserError, match=expected):
        registry.register("by_function")(of_any_channels)
    assert "by_function" not in registry


def test_timm_modules_of_the_user() -> None:
    """timm's ``embed_dim`` of a Swin is not the number of its features."""
    swin = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, **SMALL_SWIN)
    assert swin(torch.zeros(1, 3, 32, 32)).shape[1] == with_embed_dim(swin, "swin", 3).embed_dim
    swin.reset_classifier(10)
    with pytest.raises(UserError, match=r"classifier of 10 classes; .*num_classes=0"):
        with_embed_dim(swin, "swin", 3)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_is_torchvisions_without_fc(name: str) -> None:
    ours = _build(name)
    theirs = torchvision.models.get_model(name)
    theirs.fc = nn.Identity()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_convnext_is_torchvisions_without_its_last_layer() -> None:
    ours = _build("torchvision", model="convnext_tiny")
    theirs = torchvision.models.convnext_tiny()
    theirs.classifier[2] = nn.Identity()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, 32, 32)
    assert embed_dim(ours) == 768
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_cifar_stem_keeps_the_size() -> None:
    sizes = {}
    for padding in (1, 2):
        backbone = _build("resnet18", stem="cifar", stem_padding=padding)
        x = torch.zeros(1, 3, 32, 32)
        sizes[padding] = backbone.maxpool(backbone.conv1(x)).shape[-1]
    assert sizes == {1: 32, 2: 34}


def test_zero_init_residual_makes_blocks_identities() -> None:
    backbone = _build("resnet18", zero_init_residual=True)
    assert float(backbone.layer1[0].bn2.weight.detach().abs().max()) == 0


def test_a_small_resnet_is_that_of_strided_convolutions() -> None:
    """Its thin shortcuts avoid oneDNN's strided backward pass, which corrupts memory."""
    torch.manual_seed(0)
    block = _build("small_resnet", width=4, blocks=1).stages[0].double()
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    conv, norm = block.shortcut
    inner = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))
    expected = (inner + norm(F.conv2d(x, conv.weight, stride=2))).relu()
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    (found,) = torch.autograd.grad(block(x).square().sum(), x)
    torch.testing.assert_close(block(x), expected)
    torch.testing.assert_close(found, wanted)


def test_drop_path_grows_linearly_with_the_depth() -> None:
    """As in DeiT: from 0 in the first block to the given rate in the last."""
    args = {"img_size": 32, "patch_size": 16, "depth": 4}
    for backbone in (
        _build("vit_tiny", drop_path=0.3, **args),
        _build("timm", model="deit_tiny_patch16_224", args={"drop_path_rate": 0.3, **args}),
    ):
        layers = [(block.drop_path1, block.drop_path2) for block in backbone.blocks]
        rates = [[getattr(layer, "drop_prob", 0.0) for layer in both] for both in layers]
        assert rates == [pytest.approx([rate, rate]) for rate in (0.0, 0.1, 0.2, 0.3)]


@pytest.mark.parametrize("name", ["vit_tiny", "timm"])
def test_drop_path_is_the_same_in_all_blocks_if_uniform(name: str) -> None:
    """As in DINOv2: the first block too, which has no such layer in timm, and training draws."""
    args = {"img_size": 32, "patch_size": 16, "depth": 3}
    if name == "timm":
        args = {"model": "deit_tiny_patch16_224", "args": {"drop_path_rate": 0.3, **args}}
    else:
        args = {"drop_path": 0.3, **args}
    backbone = _build(name, drop_path_uniform=True, **args)
    layers = [layer for b in backbone.blocks for layer in (b.drop_path1, b.drop_path2)]
    assert [layer.drop_prob for layer in layers] == [0.3] * 6
    kept = layers[0].train()(torch.ones(1000, 2))
    assert float((kept > 0).float().mean()) == pytest.approx(0.7, abs=0.05)


def test_class_token_starts_as_in_deit_and_dino() -> None:
    """Normal of deviation 0.02; timm's own is 1e-6."""
    token = _build("vit_small").cls_token.detach()
    assert token.std().item() == pytest.approx(0.02, rel=0.15)


def test_your_own_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets.py").write_text(
        "import torch\n"
        "def pooled(width=4):\n"
        "    conv = torch.nn.Conv2d(3, width, 3)\n"
        "    return torch.nn.Sequential(conv, torch.nn.BatchNorm2d(width),\n"
        "        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())\n"
        "def maps():\n    return torch.nn.Conv2d(3, 4, 3)\n"
        "def nothing():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)  # which the path of an installed command lacks
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    backbone = _build("custom", model="my_nets:pooled", args={"width": 6})
    assert embed_dim(backbone) == 6
    assert backbone.training and int(backbone[1].num_batches_tracked) == 0  # only looked at
    for model, args, message in [
        ("my_nets:pooled", {"size": 1}, "size"),
        ("my_nets:poled", {}, "did you mean 'pooled'"),
        ("no_such_nets:f", {}, "no module named 'no_such_nets'"),
        ("my_nets:nothing", {}, "not nn.Module"),
        ("my_nets:maps", {}, r"\(1, 4, 222, 222\)"),
    ]:
        with pytest.raises(UserError, match=message):
            _build("custom", model=model, args=args)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("timm", {"model": "vit_tinny_patch16_224"}, "vit_tiny_patch16_224"),
        ("timm", {"model": "resnet18", "args": {"img_sise": 3}}, "img_sise"),
        (
            "timm",
            {"model": "resnet18", "args": {"pretrained": True}},
            r"pretrained=True: .*: init\.backbone=timm:resnet18",
        ),
        (
            "torchvision",
            {"model": "resnet18", "args": {"weights": "DEFAULT"}},
            r"weights='DEFAULT': .*: init\.backbone=torchvision:resnet18",
        ),
        ("timm", {"model": "resnet18", "args": {"num_classes": 10}}, "before its classifier"),
        ("torchvision", {"model": "resnet19"}, "did you mean 'resnet1"),
        ("torchvision", {"model": "resnet18", "args": {"widht": 3}}, "widht"),
        ("resnet9", {}, "no backbone named 'resnet9'"),
    ],
)
def test_what_cannot_be_built_is_told(name: str, args: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _build(name, **args)


@pytest.mark.parametrize(("name", "args"), [("small_resnet", {"width": 8}), ("resnet18", {})])
@pytest.mark.parametrize("norm", ["group", "ghost", "frozen"])
def test_every_norm_of_a_resnet_is_the_named_one(name: str, args: dict, norm: str) -> None:
    kinds = {"group": nn.GroupNorm, "ghost": GhostBatchNorm2d, "frozen": FrozenBatchNorm2d}
    backbone = _build(name, **args, norm=norm, norm_size=3)
    usual = [n for n, m in _build(name, **args).named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert {type(backbone.get_submodule(path)) for path in usual} == {kinds[norm]}
    assert not any(type(module) is nn.BatchNorm2d for module in backbone.modules())
    if norm == "group":  # 3 does not divide 8 channels
        assert backbone.get_submodule(usual[0]).num_groups == 1
    assert backbone(torch.randn(6, 3, 32, 32)).isfinite().all()


def test_ghost_statistics_are_those_of_a_part_of_the_batch() -> None:
    layer, plain = GhostBatchNorm2d(4, 3), nn.BatchNorm2d(4)
    x = torch.randn(7, 4, 5, 5, dtype=torch.float64)  # parts of 4 and 3
    layer.double(), plain.double()
    means = [part.mean((0, 2, 3), keepdim=True) for part in (x[:4], x[4:])]
    variances = [part.var((0, 2, 3), keepdim=True, correction=0) for part in (x[:4], x[4:])]
    parts = zip((x[:4], x[4:]), means, variances, strict=True)
    expected = torch.cat([(part - mean) / (var + 1e-5).sqrt() for part, mean, var in parts])
    torch.testing.assert_close(layer(x), expected)
    running = 0.9 * (0.1 * means[0]) + 0.1 * means[1]
    torch.testing.assert_close(layer.running_mean, running.flatten())
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))


def test_frozen_norm_keeps_the_statistics_of_loaded_weights() -> None:
    trained, x = _build("small_resnet", width=8), torch.randn(8, 3, 32, 32)
    trained(x)
    frozen = _build("small_resnet", width=8, norm="frozen")
    load_weights(frozen, trained.state_dict())
    assert sum("bn" in name for name, _ in frozen.named_parameters()) == 0
    torch.testing.assert_close(frozen.train()(x), trained.eval()(x))
    torch.testing.assert_close(
        frozen.stages[0].bn1.running_mean, trained.stages[0].bn1.running_mean
    )


def test_offers_without_a_method_extract_are_told() -> None:
    class Half(nn.Flatten):
        offers = ("dense",)

    config = load_config("densecl/digits", [])
    with pytest.raises(UserError, match=r"py:\d+: Half has an attribute `offers` and no method"):
        check_offers(Half(), config)
