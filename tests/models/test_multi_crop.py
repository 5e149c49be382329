"""Views of several sizes in one step: Swin, one pass a crop, and padded crops with a mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
import yaml
from torch import Tensor, nn

import tiny
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.data.loading.open_data import open_data
from selftask.models.build import build_backbone, check_backbone, with_embed_dim
from selftask.models.features.extract import extract
from selftask.models.network import Network, forward_by_size
from selftask.task import Task
from selftask.task.loop import train_loop

SWIN = {"embed_dim": 12, "depths": (2, 1), "num_heads": (2, 2), "num_classes": 0}
SWINS = ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"]
SIZES = (32, 32, 16, 16, 16)


def swin(name: str, img_size: int, **args: Any) -> nn.Module:
    """Windows of four patches: at 32 pixels two of them each way, at 16 pixels one."""
    torch.manual_seed(0)
    return timm.create_model(name, img_size=img_size, window_size=4, **SWIN, **args).eval()


@pytest.mark.parametrize("name", SWINS)
def test_a_swin_of_any_size_is_that_of_its_own_size_bit_for_bit(name: str) -> None:
    strict, dynamic = swin(name, 32), swin(name, 32, dynamic_img_size=True)
    dynamic.load_state_dict(strict.state_dict())
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(dynamic(images), strict(images))
    assert torch.equal(extract(dynamic, images).pooled, strict(images))


@pytest.mark.parametrize("name", SWINS)
@pytest.mark.parametrize("size", [16, 24, 40, 64])
def test_a_swin_sees_other_sizes_as_one_built_for_them(name: str, size: int) -> None:
    """With windows and shifts of the first, also where a map is smaller than a window."""
    args = {"img_size": 32, "window_size": 4, **SWIN, "dynamic_img_size": True}
    dynamic = build_backbone(Component(name="timm", args={"model": name, "args": args})).eval()
    built = swin(name, size, always_partition=True)
    built.load_state_dict(dynamic.state_dict())
    for ours, theirs in zip(dynamic.modules(), built.modules(), strict=True):
        if hasattr(ours, "shift_size"):
            assert ours.window_size == theirs.window_size == (4, 4)
            assert ours.shift_size == theirs.shift_size
    images = torch.randn(3, 3, size, size)
    assert torch.allclose(dynamic(images), built(images), atol=1e-6)
    assert torch.allclose(extract(dynamic, images).pooled, built(images), atol=1e-6)


def test_a_recipe_of_two_sizes_takes_a_dynamic_swin() -> None:
    words = ["data=digits", f"backbone=timm:{SWINS[0]}", "backbone.args.dynamic_img_size=true"]
    config = load_config("dino/images", words)
    assert {view.transforms[0].args["size"] for view in config.views.values()} == {96, 48}
    check_backbone(config, 3)


@pytest.mark.slow
def test_a_swin_trains_on_views_of_two_sizes(tmp_path: Path) -> None:
    args = {"dynamic_img_size": True, "img_size": 32, "window_size": 4, **SWIN}
    small = [{"name": "random_resized_crop", "size": 16}, {"name": "normalize"}]
    recipe = {
        "defaults": ["dino/digits", "_self_"],
        "backbone": {"name": "timm", "model": SWINS[0], "args": args},
        "views": {"local": {"count": 2, "transforms": small}},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    words = [word for word in tiny.overrides("dino", tmp_path) if not word.startswith("backbone=")]
    config = load_config(str(tmp_path / "my.yaml"), [*words, "optimizer.lr=0.001"])
    task = Task(config, sources=open_data(config.data))
    train_loop(task)
    assert [view.shape[-1] for view in task.last_batch.input] == [32, 32, 16, 16]
    losses = [row["loss"] for row in tiny.rows(tmp_path / "run")]
    assert sum(losses[-5:]) < sum(losses[:5])


def backbones() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    vit = timm.models.VisionTransformer(32, 8, embed_dim=24, depth=2, num_heads=2, num_classes=0)
    return {
        "resnet": torchvision.models.resnet18(num_classes=4),
        "vit": vit,
        "swin": with_embed_dim(swin(SWINS[0], 32, dynamic_img_size=True), "swin", 3),
    }


@pytest.mark.parametrize("name", ["resnet", "vit", "swin"])
def test_views_of_one_size_in_a_pass_are_one_pass_a_crop(name: str) -> None:
    """Features and gradients, with BatchNorm's running statistics, sizes in any order."""
    backbone = backbones()[name].eval().double()
    views = [torch.randn(2, 3, size, size).double() for size in (16, 32, 16, 32, 16)]
    grouped = Network(backbone, nn.Identity())(views)
    grouped.square().sum().backward()
    gradients = [p.grad.clone() for p in backbone.parameters() if p.grad is not None]
    backbone.zero_grad()
    alone = torch.stack([extract(backbone, view).pooled for view in views])
    alone.square().sum().backward()
    assert torch.allclose(grouped, alone, atol=1e-9)
    one_by_one = Network(backbone, nn.Identity(), per_view=True)(views)
    assert torch.allclose(grouped, one_by_one, atol=1e-9)
    expected = [p.grad for p in backbone.parameters() if p.grad is not None]
    assert len(gradients) == len(expected)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-8)


def padded(views: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All crops in one batch, zeros at right and below, and a mask that is 1 in the images."""
    side = max(view.shape[-1] for view in views)
    sizes = [(0, side - view.shape[-1], 0, side - view.shape[-2]) for view in views]
    canvases = torch.cat([F.pad(view, size) for view, size in zip(views, sizes, strict=True)])
    inside = [F.pad(torch.ones_like(v[:, :1]), s) for v, s in zip(views, sizes, strict=True)]
    return canvases, torch.cat(inside)


def test_one_padded_pass_of_a_resnet_is_a_pass_for_each_size() -> None:
    """The mask, at the resolution of each map, is applied after every BatchNorm and pooling.

    Without it, as VISSL masks the last map alone, values of the padding reach into the crops.
    """
    resnet: Any = backbones()["resnet"].eval().double()
    for part in resnet.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, std=0.1)
            nn.init.normal_(part.bias, std=0.1)
    resnet.fc = nn.Identity()
    views = [torch.randn(2, 3, size, size).double() for size in (64, 64, 32, 32, 32)]
    images, mask = padded(views)

    def clear(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * F.interpolate(mask, output.shape[-2:])

    def pool(module: nn.Module, inputs: tuple[Tensor]) -> None:
        inside = F.interpolate(mask, inputs[0].shape[-2:])
        means.append((inputs[0] * inside).sum((2, 3)) / inside.sum((2, 3)))

    expected, means = forward_by_size(resnet, views), []
    resnet.avgpool.register_forward_pre_hook(pool)
    resnet(images)
    assert not torch.allclose(means[-1], expected, atol=1e-3)
    for part in resnet.modules():
        if isinstance(part, nn.BatchNorm2d | nn.MaxPool2d):
            part.register_forward_hook(clear)
    resnet(images)
    assert torch.allclose(means[-1], expected, atol=1e-9)


def test_one_padded_pass_of_a_transformer_is_a_pass_for_each_size() -> None:
    """Its positions are equal, as those of a small crop are interpolated and not cut out."""
    vit: Any = backbones()["vit"].eval().double()
    with torch.no_grad():
        vit.pos_embed.copy_(torch.randn(24).expand_as(vit.pos_embed))
    views = [torch.randn(2, 3, size, size).double() for size in SIZES]
    images, mask = padded(views)
    outside = F.max_pool2d(mask, 8).flatten(1) == 0  # (V*B, N) patches
    every = torch.arange(outside.shape[1]).expand(len(images), -1)
    together = extract(vit, images, keep=every, padding=outside).pooled
    assert torch.allclose(together, forward_by_size(vit, views), atol=1e-9)
    assert not torch.allclose(vit(images), together, atol=1e-3)
