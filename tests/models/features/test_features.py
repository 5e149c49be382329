"""Features of any backbone in one form: against the libraries' own forward passes and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.backbones.libraries import Torchvision
from selftask.models.backbones.small_resnet import SmallResNet
from selftask.models.build import build_backbone
from selftask.models.features.extract import FeatureExtractor, adapter_of, extract, offers, pooled
from selftask.models.features.tokens import Features, from_map
from selftask.models.weights.load import load_weights

DENSE = frozenset({"dense", "hidden"})
SPARSE, TOKENS, GROUPS = DENSE | {"sparse"}, DENSE | {"tokens"}, DENSE | {"tokens", "groups"}
SUBSET = GROUPS | {"subset", "attention"}
SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}


def _vit(**args: Any) -> VisionTransformer:
    return VisionTransformer(num_classes=0, **{**SIZES, **args})


def _timm(name: str, **args: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=0, **args)


def _torchvision(name: str, **args: Any) -> Callable[[], nn.Module]:
    return lambda: Torchvision(model=name, args=args).build()


def _torchvision_vit(image_size: int = 32) -> nn.Module:
    vit: Any = torchvision.models.VisionTransformer(image_size, 8, 2, 2, 24, 48)
    vit.heads = nn.Identity()
    return vit


def _eva(name: str, **args: Any) -> Callable[[], nn.Module]:
    return _timm(name, **{**SIZES, **args})


def _own(**args: Any) -> Callable[[], nn.Module]:
    small = {"patch_size": 8, "depth": 2, "registers": 4, **args}
    return lambda: build_backbone(Component(name="vit_micro", args=small))


SWIN = {"img_size": 32, "window_size": 2, "embed_dim": 12, "depths": (1, 2), "num_heads": (2, 2)}
BACKBONES: dict[str, tuple[Callable[[], nn.Module], frozenset[str]]] = {
    "vit": (_vit, SUBSET),
    "vit_avg": (lambda: _vit(global_pool="avg", class_token=False), SUBSET),
    "vit_registers": (lambda: _vit(reg_tokens=2, no_embed_class=True), SUBSET),
    "vit_no_positions": (lambda: _vit(pos_embed="none", pre_norm=True), SUBSET),
    "vit_dynamic": (lambda: _vit(dynamic_img_size=True, init_values=0.1), SUBSET),
    "vit_map": (lambda: _vit(global_pool="map", class_token=False), SUBSET),
    "dinov3": (_eva("vit_small_patch16_dinov3_qkvb"), SUBSET),
    "dinov3_fixed": (_eva("vit_small_patch16_dinov3", dynamic_img_size=False), SUBSET),
    "eva02": (_eva("eva02_tiny_patch14_224"), SUBSET),
    "rope_mixed": (_eva("vit_small_patch16_rope_mixed_224"), SUBSET),
    "rope_registers": (_eva("vit_base_patch16_rope_reg1_gap_256"), SUBSET),
    "own_learned": (_own(swiglu=True, layer_scale=0.1), SUBSET),
    "own_rope": (_own(positions="rope", swiglu=True, layer_scale=0.1), SUBSET),
    "own_rope_capi": (_own(positions="rope_capi", pool="avg", class_token=False), SUBSET),
    "own_rope_eva": (_own(positions="rope_eva", dynamic_img_size=True), SUBSET),
    "deit_distilled": (_timm("deit_tiny_distilled_patch16_224", img_size=32, depth=2), TOKENS),
    "beit": (_timm("beit_base_patch16_224", img_size=32, depth=2, embed_dim=48), TOKENS),
    "swin": (_timm("swin_tiny_patch4_window7_224", **SWIN), GROUPS),
    "swinv2": (_timm("swinv2_tiny_window8_256", **SWIN), GROUPS),
    "convnext": (_timm("convnext_atto", depths=(1, 1, 1, 1)), SPARSE),
    "small_resnet": (lambda: SmallResNet(4, blocks=1, stem_stride=2), SPARSE),
    "timm_resnet": (_timm("resnet18"), SPARSE),
    "mobilenet": (_timm("mobilenetv3_small_050"), DENSE),
    "torchvision_resnet": (_torchvision("resnet18"), SPARSE),
    "torchvision_swin": (_torchvision("swin_t"), TOKENS),
    "torchvision_convnext": (_torchvision("convnext_tiny"), DENSE),
    "torchvision_efficientnet": (_torchvision("efficientnet_b0"), DENSE),
    "torchvision_regnet": (_torchvision("regnet_y_400mf"), DENSE),
    "torchvision_vit": (_torchvision_vit, TOKENS),
}
MASKABLE = [name for name, (_, offered) in BACKBONES.items() if "tokens" in offered]


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    backbone = BACKBONES[name][0]()
    for parameter in backbone.parameters():  # so that nothing is zero and goes unnoticed
        nn.init.normal_(parameter, mean=0.1, std=0.1)
    return backbone.eval()


@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_features_are_those_of_the_library(name: str) -> None:
    backbone, images = _build(name), torch.randn(2, 3, 32, 32)
    assert offers(backbone) == BACKBONES[name][1]
    features = FeatureExtractor(backbone)(images, layers=(0, -1))
    assert torch.equal(features.pooled, backbone(images))
    rows, columns = features.tokens.grid
    assert features.tokens.map.shape == (2, features.tokens.patches.shape[2], rows, columns)
    assert torch.equal(features.tokens.map[:, :, -1, 0], features.tokens.patches[:, -columns])
    if hasattr(backbone, "forward_features"):
        own = backbone.forward_features(images)
        if own.ndim == 3:
            assert torch.equal(features.tokens.sequence, own)
        else:
            is_last = getattr(backbone, "output_fmt", "") == "NHWC"
            assert torch.equal(features.tokens.map, own.permute(0, 3, 1, 2) if is_last else own)
    assert sorted(features.hidden) == [0, adapter_of(backbone).num_layers - 1]


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("vit_registers", ["blocks.0", "blocks.1", "blocks.2"]),
        ("beit", ["blocks.0", "blocks.1"]),
        ("small_resnet", ["stem", "stages.0", "stages.1", "stages.2"]),
        ("swin", ["layers.0", "layers.1"]),
        ("timm_resnet", ["act1", "layer1", "layer2", "layer3", "layer4"]),
        ("torchvision_resnet", ["relu", "layer1", "layer2", "layer3", "layer4"]),
        ("torchvision_swin", [f"features.{i}" for i in range(8)]),
        ("torchvision_vit", [f"encoder.layers.encoder_layer_{i}" for i in range(2)]),
    ],
)
@torch.no_grad()
def test_hidden_layers_are_the_outputs_of_the_modules(name: str, modules: list[str]) -> None:
    backbone, seen = _build(name), {}
    for number, module in enumerate(modules):
        backbone.get_submodule(module).register_forward_hook(
            lambda module, inputs, output, number=number: seen.setdefault(number, output.clone())
        )
    features = extract(backbone, torch.randn(2, 3, 32, 32), layers=tuple(range(len(modules))))
    for number in range(len(modules)):
        mine, theirs = features.hidden[number], seen[number]
        if theirs.ndim == 3:
            assert torch.equal(mine.sequence, theirs)
        else:
            is_last = "swin" in name
            assert torch.equal(mine.map, theirs.permute(0, 3, 1, 2) if is_last else theirs)


@pytest.mark.parametrize("name", ["vit_registers", "eva02", "own_rope", "beit", "torchvision_vit"])
@torch.no_grad()
def test_a_hidden_layer_may_have_the_final_norm(name: str) -> None:
    backbone = _build(name)
    features = extract(backbone, torch.randn(2, 3, 32, 32), layers=(-1,))
    ((_, hidden),) = features.hidden.items()
    normalized = adapter_of(backbone).normalized(hidden)
    assert torch.allclose(normalized.sequence, features.tokens.sequence, atol=1e-5)
    assert (normalized.grid, normalized.prefix.shape) == (hidden.grid, hidden.prefix.shape)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "init_values": 0.1, "reg_tokens": 2}])
def test_pooling_the_class_token_needs_no_more_of_the_last_block(
    options: dict[str, Any], fused: bool
) -> None:
    """Features and gradients are timm's; a hook sees the whole block."""
    torch.manual_seed(0)
    vit, images = _vit(**options).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for block in vit.blocks:
        block.attn.fused_attn = fused
    results = []
    for forward in (vit, partial(pooled, vit)):
        with FlopCounterMode(display=False) as counter:
            features = forward(images)
        gradients = torch.autograd.grad(features.square().sum(), [*vit.parameters()])
        results.append((counter.get_total_flops(), [features, *gradients]))
    (whole, expected), (shorter, found) = results
    assert shorter < 0.82 * whole  # the last of three blocks
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    seen: list[torch.Size] = []
    vit.blocks[-1].mlp.register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
    assert torch.equal(pooled(vit, images), vit(images))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("name", MASKABLE)
def test_masked_pixels_do_not_reach_the_network_and_the_token_does(name: str) -> None:
    backbone = _build(name)
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    adapter = adapter_of(backbone)
    rows, columns = adapter.grid(32, 32)
    mask = torch.rand(2, rows * columns) < 0.5
    token = torch.randn(adapter.mask_dim, requires_grad=True)
    extract(backbone, images, mask=mask, mask_token=token).pooled.square().sum().backward()
    height, width = adapter.patch_size
    patches = images.grad.abs().unfold(2, height, height).unfold(3, width, width)
    reached = patches.sum(dim=(1, 4, 5)).flatten(1) > 0
    assert torch.equal(reached, ~mask)
    assert token.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["vit", "vit_dynamic", "swin", "torchvision_swin"])
@torch.no_grad()
def test_masking_is_that_of_simmim(name: str) -> None:
    """x * (1 - w) + token * w on patch embeddings, before positions: SimMIM's published code."""
    backbone, images = _build(name), torch.randn(2, 3, 32, 32)
    rows, columns = adapter_of(backbone).grid(32, 32)
    mask = torch.rand(2, rows * columns) < 0.5
    token = torch.randn(adapter_of(backbone).mask_dim)
    mine = extract(backbone, images, mask=mask, mask_token=token).pooled

    embed = backbone.features[0] if name == "torchvision_swin" else backbone.patch_embed

    def replace(module: nn.Module, inputs: Any, x: Tensor) -> Tensor:
        w = mask.view(*x.shape[:-1], 1).float()
        return x * (1 - w) + token * w

    embed.register_forward_hook(replace)
    assert torch.allclose(mine, backbone(images), rtol=1e-5, atol=1e-5)


VITS = [name for name, (_, offered) in BACKBONES.items() if "subset" in offered]


@pytest.mark.parametrize("name", VITS)
@torch.no_grad()
def test_a_subset_of_all_patches_in_order_changes_nothing(name: str) -> None:
    vit, images = _build(name), torch.randn(3, 3, 32, 32)
    whole = extract(vit, images)
    keep, padding = torch.arange(16).expand(3, -1), torch.zeros(3, 16, dtype=torch.bool)
    kept = extract(vit, images, keep=keep)
    assert torch.allclose(kept.pooled, whole.pooled, atol=1e-6)  # mean over another layout
    assert torch.equal(kept.tokens.sequence, whole.tokens.sequence)
    padded = extract(vit, images, keep=keep, padding=padding)
    assert torch.allclose(padded.tokens.sequence, whole.tokens.sequence, atol=1e-5)
    with pytest.raises(ValueError, match="no map"):
        _ = kept.tokens.map


@pytest.mark.parametrize("name", VITS)
@torch.no_grad()
def test_patches_attend_to_those_that_are_named(name: str) -> None:
    """The first 6 to each other alone: their features are those of an image without the others."""
    vit, images = _build(name), torch.randn(3, 3, 32, 32)
    attend = torch.ones(3, 16, 16, dtype=torch.bool)
    attend[:, :6, 6:] = False
    limited = extract(vit, images, attend=attend)
    other = images.clone()
    other[:, :, 16:] = 0  # patches 8 to 15
    changed = extract(vit, other, attend=attend)
    torch.testing.assert_close(limited.patches[:, :6], changed.patches[:, :6])
    assert not torch.allclose(limited.patches[:, 6:], changed.patches[:, 6:], atol=1e-3)
    assert not torch.allclose(limited.patches, extract(vit, images).patches, atol=1e-3)


@pytest.mark.parametrize("name", [n for n, (_, kinds) in BACKBONES.items() if "groups" in kinds])
@torch.no_grad()
def test_groups_of_patches_are_to_each_other_as_if_they_were_not_there(name: str) -> None:
    """Squares of 8 pixels. One group of all is the network itself."""
    backbone = _build(name)
    group = torch.tensor([[0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0]]).expand(2, -1)
    images = torch.randn(2, 3, 32, 32)
    pixels = group.view(2, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3).bool()
    others = torch.where(pixels, torch.randn_like(images), images)
    limited, changed = (extract(backbone, x, groups=group).patches for x in (images, others))
    assert torch.equal(limited[group == 0], changed[group == 0])
    assert not torch.isclose(limited[group == 1], changed[group == 1]).all(dim=1).any()
    has_prefix = extract(backbone, images).prefix.shape[1]  # no patch attends to it
    options = {"attend": torch.ones(2, 16, 16, dtype=torch.bool)} if has_prefix else {}
    whole = extract(backbone, images, **options).patches
    assert not torch.allclose(whole, limited, atol=1e-4)
    together = extract(backbone, images, groups=torch.ones_like(group)).patches
    torch.testing.assert_close(together, whole)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "name", ["vit", "vit_avg", "vit_registers", "dinov3", "rope_mixed", "own_rope_capi"]
)
@torch.no_grad()
def test_padding_changes_nothing(name: str, fused: bool) -> None:
    vit: Any = _build(name)
    for block in vit.blocks:
        block.attn.fused_attn = fused
    images, counts = torch.randn(3, 3, 32, 32), (5, 7, 3)
    keep = torch.stack([torch.randperm(16)[:7] for _ in counts])
    padding = torch.arange(7)[None] >= torch.tensor(counts)[:, None]
    padded = extract(vit, images, keep=keep, padding=padding)
    for i, count in enumerate(counts):
        alone = extract(vit, images[i : i + 1], keep=keep[i : i + 1, :count])
        assert torch.allclose(padded.tokens.patches[i, :count], alone.tokens.patches[0], atol=1e-5)
        assert torch.allclose(padded.tokens.prefix[i], alone.tokens.prefix[0], atol=1e-5)
        assert torch.allclose(padded.pooled[i], alone.pooled[0], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in VITS if name != "own_rope_capi"])
@torch.no_grad()
def test_a_subset_is_what_unattended_patches_leave(name: str) -> None:
    """All patches are encoded by timm's blocks, under a mask that hides those that are left out."""
    vit: Any = _build(name)
    images, keep = torch.randn(3, 3, 32, 32), torch.stack([torch.randperm(16)[:5] for _ in "123"])
    hidden = torch.ones(3, 16, dtype=torch.bool).scatter(1, keep, False)
    num_prefix = vit.num_prefix_tokens
    seen = torch.cat([torch.ones(3, num_prefix, dtype=torch.bool), ~hidden], dim=1)
    mask = seen[:, None, None].expand(-1, 1, seen.shape[1], -1)
    if hasattr(vit, "rope"):
        whole = vit.forward_features(images, attn_mask=mask)
    else:
        x = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
        for block in vit.blocks:
            x = block(x, attn_mask=mask)
        whole = vit.norm(x)
    kept = extract(vit, images, keep=keep).tokens
    assert torch.allclose(kept.prefix, whole[:, :num_prefix], atol=1e-5)
    rows = keep[..., None].expand(-1, -1, whole.shape[2]) + num_prefix
    assert torch.allclose(kept.patches, whole.gather(1, rows), atol=1e-5)


@pytest.mark.parametrize("name", ["dinov3", "dinov3_fixed", "eva02", "rope_mixed"])
@torch.no_grad()
def test_rotary_positions_of_another_size_are_timms(name: str) -> None:
    """Of a released model whose file is loaded for another size, and of images of another size."""
    vit, images = _build(name), torch.randn(2, 3, 48, 48)
    resized: Any = copy.deepcopy(vit)
    resized.set_input_size(img_size=48)
    expected = resized.forward_features(images)
    actual = extract(vit, images).tokens.sequence
    assert torch.allclose(actual, expected, atol=1e-5)
    loaded: Any = BACKBONES[name][0]()
    loaded.set_input_size(img_size=48)
    load_weights(loaded, vit.state_dict())
    assert torch.allclose(loaded.eval().forward_features(images), expected, atol=1e-5)


@torch.no_grad()
def test_torchvisions_vit_of_another_size_has_timms_positions() -> None:
    vit, other = _torchvision_vit(), _torchvision_vit(48)
    state = vit.state_dict()
    key = "encoder.pos_embedding"
    state[key] = timm.layers.resample_abs_pos_embed(state[key], [6, 6], num_prefix_tokens=1)
    other.load_state_dict(state)
    images = torch.randn(2, 3, 48, 48)
    assert torch.allclose(extract(vit.eval(), images).pooled, other.eval()(images), atol=1e-6)


class _Colors(nn.Module):
    """Somebody's own module."""

    offers = ("dense",)

    def extract(self, images: Tensor) -> Features:
        return Features(images.mean(dim=(2, 3)), from_map(images), {})


def test_a_module_of_ones_own_takes_part() -> None:
    images = torch.randn(2, 3, 4, 4)
    features = extract(_Colors(), images)
    assert torch.equal(features.tokens.map, images)
    assert offers(_Colors()) == {"dense"}
    with pytest.raises(UserError, match="a _Colors takes no layers"):
        extract(_Colors(), images, layers=(0,))


def test_what_a_backbone_cannot_do_is_told() -> None:
    plain = nn.Sequential(nn.Flatten())
    assert offers(plain) == frozenset()
    with pytest.raises(UserError, match="a Sequential gives one vector an image"):
        extract(plain, torch.zeros(1, 3, 4, 4))
    resnet, mask = _build("torchvision_resnet"), torch.zeros(1, 4, dtype=torch.bool)
    with pytest.raises(UserError, match="a ResNet takes no mask"):
        extract(resnet, torch.zeros(1, 3, 32, 32), mask=mask, mask_token=torch.zeros(3))
    with pytest.raises(UserError, match="a SwinTransformer takes no keep"):
        extract(_build("swin"), torch.zeros(1, 3, 32, 32), keep=torch.zeros(1, 1).long())
    with pytest.raises(UserError, match="layers: 3; the backbone has layers 0 to 2"):
        extract(_vit(), torch.zeros(1, 3, 32, 32), layers=(3,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_registers", "swin", "dinov3", "own_rope_capi"])
@torch.no_grad()
def test_compiled_features_are_the_same(name: str) -> None:
    backbone, images = _build(name), torch.randn(2, 3, 32, 32)
    adapter = adapter_of(backbone)
    rows, columns = adapter.grid(32, 32)
    mask, token = torch.rand(2, rows * columns) < 0.5, torch.randn(adapter.mask_dim)
    options: dict[str, Any] = {"layers": (0,), "mask": mask, "mask_token": token}
    if name == "swin":
        options["groups"] = torch.rand(2, 16) < 0.5
    extractor = FeatureExtractor(backbone)
    compiled = torch.compile(extractor, backend="eager")
    actual, expected = compiled(images, **options), extractor(images, **options)
    assert torch.allclose(actual.pooled, expected.pooled, atol=1e-6)
    assert torch.allclose(actual.tokens.map, expected.tokens.map, atol=1e-6)
    assert torch.allclose(actual.hidden[0].patches, expected.hidden[0].patches, atol=1e-6)
