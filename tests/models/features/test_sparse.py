"""Convolutions that leave out hidden patches: against sums over visible positions alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn

from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.backbones.libraries import Torchvision
from selftask.models.backbones.small_resnet import SmallResNet
from selftask.models.build import build_backbone
from selftask.models.features.extract import adapter_of, extract, offers
from selftask.models.features.levels import levels_of
from selftask.models.features.sparse import VISIBLE, check_layers, see_visible_patches
from selftask.parallel.activation_checkpointing import checkpoint_blocks
from selftask.parallel.blocks import find_blocks

TINY = {"depths": (1, 1, 1, 1), "dims": (4, 4, 6, 8)}
Vectors = dict[tuple[int, int, int], Tensor]
"""(image, row, column) -> (C,), for visible positions only."""


def _timm(name: str, **args: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=0, **args)


BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "small_resnet": lambda: SmallResNet(4, blocks=1, stem_stride=1),
    "torchvision_resnet": lambda: Torchvision(model="resnet18", args={}).build(),
    "timm_bottlenecks": _timm("resnet14t"),
    "group_norm": _timm("resnet10t", norm_layer="groupnorm1"),
    "convnext": _timm("convnext_atto", **TINY),
    "convnext_linear": _timm("convnext_atto", conv_mlp=False, **TINY),
    "convnextv2": _timm("convnextv2_atto", **TINY),
}


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    backbone = BACKBONES[name]().double()
    for parameter in backbone.parameters():  # so that nothing is zero and goes unnoticed
        nn.init.normal_(parameter, mean=0.1, std=0.1)
    return backbone.train()


def _visible() -> Tensor:
    """Of 2 x 3 patches."""
    return torch.tensor([[0, 4, 5], [3, 1, 2]])


def _inputs(backbone: nn.Module) -> tuple[Tensor, Tensor]:
    side = adapter_of(backbone).stride
    torch.manual_seed(1)
    return torch.randn(2, 3, 2 * side, 3 * side, dtype=torch.float64), _visible()


def _hidden(visible: Tensor, size: tuple[int, int]) -> Tensor:
    rows, columns = size
    hidden = torch.ones(2, 6).scatter(1, visible, 0.0).view(2, 1, 2, 3)
    return nn.functional.interpolate(hidden, size=(rows, columns), mode="nearest") > 0


@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_hidden_pixels_change_nothing_at_visible_positions(name: str) -> None:
    """In train mode, with the statistics of the batch; not even NaN gets through."""
    backbone = _build(name)
    check_layers(backbone)
    images, visible = _inputs(backbone)
    pixels = _hidden(visible, images.shape[2:]).expand_as(images)
    other = copy.deepcopy(backbone)
    layers = tuple(range(adapter_of(backbone).num_layers))
    first = extract(backbone, images, visible=visible, layers=layers)
    spoiled = images.masked_fill(pixels, math.nan)
    second = extract(other, spoiled, visible=visible, layers=layers)
    assert torch.equal(first.pooled, second.pooled)
    for layer in layers:
        maps = first.hidden[layer].map, second.hidden[layer].map
        seen = ~_hidden(visible, maps[0].shape[2:]).expand_as(maps[0])
        assert torch.equal(maps[0][seen], maps[1][seen])
        assert maps[0][seen].isfinite().all()
        assert maps[0][seen].std() > 0
    for mine, theirs in zip(backbone.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_all_patches_visible_is_the_dense_network_and_other_passes_stay_dense(name: str) -> None:
    backbone = _build(name)
    images, _ = _inputs(backbone)
    dense = copy.deepcopy(backbone)
    expected = extract(dense, images)
    actual = extract(backbone, images, visible=torch.arange(6).flip(0).expand(2, -1))
    assert torch.allclose(actual.tokens.map, expected.tokens.map, atol=1e-10)
    assert torch.allclose(actual.pooled, expected.pooled, atol=1e-10)
    assert torch.equal(backbone.eval()(images), copy.deepcopy(backbone)(images))
    assert VISIBLE.indices is None


@pytest.mark.parametrize("name", BACKBONES)
def test_activation_checkpointing_changes_no_gradient(name: str) -> None:
    backbone = _build(name)
    images, visible = _inputs(backbone)
    recomputed = copy.deepcopy(backbone)
    blocks = find_blocks(recomputed)
    checkpoint_blocks(blocks)
    for network in (backbone, recomputed):
        extract(network, images, visible=visible).pooled.square().sum().backward()
    assert blocks
    for mine, theirs in zip(recomputed.parameters(), backbone.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


# -- a direct reference ----------------------------------------------------------------------------


def _vectors(x: Tensor, hidden: Tensor) -> Vectors:
    return {
        (b, y, c): x[b, :, y, c]
        for b in range(x.shape[0])
        for y in range(x.shape[2])
        for c in range(x.shape[3])
        if not hidden[b, 0, y, c]
    }


def _conv(x: Vectors, layer: Any) -> Vectors:
    """At each visible place, the sum over visible neighbors."""
    kernel, stride, padding = layer.kernel_size[0], layer.stride[0], layer.padding[0]
    places = {(b, y // stride, c // stride) for b, y, c in x}
    out: Vectors = {}
    for b, y, c in places:
        total = torch.zeros(layer.out_channels, dtype=torch.float64)
        for i in range(kernel):
            for j in range(kernel):
                near = x.get((b, y * stride + i - padding, c * stride + j - padding))
                if near is None:
                    continue
                weight = layer.weight[:, :, i, j]  # (out, in), (out, 1) of depth-wise ones
                total = total + (weight[:, 0] * near if layer.groups > 1 else weight @ near)
        out[b, y, c] = total if layer.bias is None else total + layer.bias
    return out


def _each(x: Vectors, function: Callable[[Tensor], Tensor]) -> Vectors:
    return {place: function(vector) for place, vector in x.items()}


def _plus(a: Vectors, b: Vectors) -> Vectors:
    return {place: vector + b[place] for place, vector in a.items()}


def _batch_norm(x: Vectors, layer: Any) -> Vectors:
    rows = torch.stack([*x.values()])
    mean, variance = rows.mean(dim=0), rows.var(dim=0, unbiased=False)
    scale = layer.weight / (variance + layer.eps).sqrt()
    return _each(x, lambda vector: (vector - mean) * scale + layer.bias)


def _layer_norm(x: Vectors, layer: Any) -> Vectors:
    def normalize(v: Tensor) -> Tensor:
        scaled = (v - v.mean()) / (v.var(unbiased=False) + layer.eps).sqrt()
        return scaled * layer.weight + layer.bias

    return _each(x, normalize)


def _response_norm(x: Vectors, layer: Any) -> Vectors:
    """ConvNeXt V2, equations 1 to 3 and the residual, over the visible positions of an image."""
    out: Vectors = {}
    for image in {b for b, _, _ in x}:
        mine = {place: vector for place, vector in x.items() if place[0] == image}
        norms = torch.stack([*mine.values()]).square().sum(dim=0).sqrt()
        share = norms / (norms.mean() + layer.eps)
        out |= _each(mine, lambda v, share=share: layer.weight * (v * share) + layer.bias + v)
    return out


def _residual(x: Vectors, block: Any) -> Vectors:
    out = _each(_batch_norm(_conv(x, block.conv1), block.bn1), torch.relu)
    out = _batch_norm(_conv(out, block.conv2), block.bn2)
    skip = _batch_norm(_conv(x, block.shortcut[0]), block.shortcut[1])
    return _each(_plus(out, skip), torch.relu)


def _convnext_block(x: Vectors, block: Any) -> Vectors:
    out = _layer_norm(_conv(x, block.conv_dw), block.norm)
    out = _response_norm(_each(_conv(out, block.mlp.fc1), nn.functional.gelu), block.mlp.grn)
    return _plus(x, _conv(out, block.mlp.fc2))


def _expected(backbone: Any, x: Vectors) -> Vectors:
    if isinstance(backbone, SmallResNet):
        x = _each(_batch_norm(_conv(x, backbone.stem[0]), backbone.stem[1]), torch.relu)
        for block in backbone.stages:
            x = _residual(x, block)
        return x
    x = _layer_norm(_conv(x, backbone.stem[0]), backbone.stem[1])
    for stage in backbone.stages:
        if len(list(stage.downsample.children())):
            x = _conv(_layer_norm(x, stage.downsample[0]), stage.downsample[1])
        x = _convnext_block(x, stage.blocks[0])
    return x


@pytest.mark.parametrize("name", ["small_resnet", "convnextv2"])
@torch.no_grad()
def test_maps_are_those_of_sums_over_visible_positions(name: str) -> None:
    """Submanifold convolutions: no others are computed, and no others are summed."""
    backbone = _build(name)
    images, visible = _inputs(backbone)
    features = extract(copy.deepcopy(backbone), images, visible=visible)
    x = _expected(backbone, _vectors(images, _hidden(visible, images.shape[2:])))
    assert len(x) == visible.numel()
    for (b, y, c), vector in x.items():
        assert torch.allclose(features.tokens.map[b, :, y, c], vector, atol=1e-10)
    if name == "small_resnet":
        of_first = torch.stack([x[place] for place in x if place[0] == 0]).mean(dim=0)
        assert torch.allclose(features.pooled[0], of_first, atol=1e-10)


@pytest.mark.parametrize(
    ("start", "figures"),
    [(0, (30.930710585901682, 21.855231554311352)), (500, (30.37942616250211, 27.312532790187777))],
)
def test_response_norm_of_visible_positions_is_that_of_the_authors(
    start: int, figures: tuple[float, float]
) -> None:
    """facebookresearch/ConvNeXt-V2; figures of shared/oracles, whose map is half of this one."""

    def draw(seed: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layer = GlobalResponseNorm(12).double()
    layer.weight.data = draw(start + 14, 12)
    layer.bias.data = draw(start + 15, 12)
    see_visible_patches(layer)
    x = draw(start + 13, 2, 4, 4, 12).requires_grad_()
    both = torch.cat([torch.full_like(x, 1e3), x], dim=1)  # the upper patch is hidden
    with VISIBLE.only(torch.ones(2, 1, dtype=torch.int64), (2, 1)):
        out = layer(both)[:, 4:]
    (out * draw(start + 16, 2, 4, 4, 12)).sum().backward()
    assert out.norm().item() == pytest.approx(figures[0], rel=1e-9)
    assert x.grad.norm().item() == pytest.approx(figures[1], rel=1e-9)


def test_levels_are_the_last_maps_of_each_resolution() -> None:
    small = levels_of(BACKBONES["small_resnet"](), 3)
    assert small == [(3, 16, 8), (2, 8, 4), (1, 4, 2), (0, 4, 1)]
    resnet = levels_of(BACKBONES["torchvision_resnet"](), 3)
    assert resnet == [(4, 512, 32), (3, 256, 16), (2, 128, 8), (1, 64, 4), (0, 64, 2)]
    convnext = levels_of(BACKBONES["convnextv2"](), 3)
    assert convnext == [(3, 8, 32), (2, 6, 16), (1, 4, 8), (0, 4, 4)]


def test_layers_that_mix_positions_otherwise_are_refused() -> None:
    for name, layer in (("seresnet18", "SEModule"), ("resnetblur18", "BlurPool2d")):
        with pytest.raises(UserError, match=rf"backbone: its \S+ is a {layer}, which cannot"):
            check_layers(_timm(name)())
    with pytest.raises(UserError, match="backbone: it is a Softmax, which cannot"):
        check_layers(torch.nn.Softmax(dim=1))
    assert "sparse" not in offers(_timm("mobilenetv3_small_050")())


def test_maps_that_patches_do_not_divide_are_refused() -> None:
    padded = {"stem": "cifar", "stem_padding": 2}
    backbone = build_backbone(Component(name="resnet18", args=padded))
    with pytest.raises(UserError, match="map of 18x26 cannot be divided into the 2x3 patches"):
        extract(backbone, torch.zeros(2, 3, 16, 24), visible=_visible())
    assert VISIBLE.indices is None
