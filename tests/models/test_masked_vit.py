"""Subsets of patches through a timm transformer."""

from __future__ import annotations

import math

import pytest
import torch
from timm.models import VisionTransformer
from torch import nn

from selftask.errors import UserError
from selftask.models import masked_vit as mv

LAYOUTS = [
    {},
    {"class_token": False, "global_pool": "avg"},
    {"reg_tokens": 2},
    {"reg_tokens": 2, "no_embed_class": True},
    {"pos_embed": "none"},
    {"pre_norm": True},
]


def _vit(**args: object) -> VisionTransformer:
    torch.manual_seed(0)
    vit = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=0, **args
    )
    for parameter in vit.parameters():  # so that nothing is zero and goes unnoticed
        nn.init.normal_(parameter, std=0.1)
    return vit.eval()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_patches_kept_is_the_plain_forward(layout: dict) -> None:
    vit = _vit(**layout)
    images = torch.randn(3, 3, 16, 16)
    tokens = mv.patch_tokens(vit, images)
    assert tokens.shape == (3, mv.num_patches(vit), 24)
    expected = vit.forward_features(images)
    assert torch.equal(mv.encode(vit, tokens), expected)
    keep = torch.arange(16).expand(3, -1)
    assert torch.equal(mv.encode(vit, tokens, keep), expected)
    padding = torch.zeros(3, 16, dtype=torch.bool)
    assert torch.allclose(mv.encode(vit, tokens, keep, padding=padding), expected, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_padding_changes_nothing(layout: dict, fused: bool) -> None:
    vit = _vit(**layout)
    for block in vit.blocks:
        block.attn.fused_attn = fused
    tokens = mv.patch_tokens(vit, torch.randn(3, 3, 16, 16))
    counts = (5, 7, 3)
    keep = torch.stack([torch.randperm(16)[:7] for _ in counts])
    padding = torch.arange(7)[None] >= torch.tensor(counts)[:, None]
    padded = mv.encode(vit, tokens, keep, padding=padding)
    prefix = vit.num_prefix_tokens
    for image, count in enumerate(counts):
        alone = mv.encode(vit, tokens[image : image + 1], keep[image : image + 1, :count])
        assert torch.allclose(padded[image, : prefix + count], alone[0], atol=1e-5)


def test_order_of_kept_patches_is_no_matter() -> None:
    vit = _vit()
    tokens = mv.patch_tokens(vit, torch.randn(1, 3, 16, 16))
    keep = torch.tensor([[3, 9, 1]])
    turned = keep.flip(1)
    a, b = mv.encode(vit, tokens, keep), mv.encode(vit, tokens, turned)
    assert torch.allclose(a[:, 1:], b[:, 1:].flip(1), atol=1e-5)


def test_patchify_cuts_row_by_row_and_back() -> None:
    images = torch.randn(2, 3, 8, 12)
    patches = mv.patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    corner = images[:, :, 4:8, 8:12]  # second row, third column
    assert torch.equal(patches[:, 5], corner.permute(0, 2, 3, 1).reshape(2, -1))
    assert torch.equal(mv.unpatchify(patches, 4, (2, 3)), images)
    with pytest.raises(ValueError, match="8 x 10"):
        mv.patchify(torch.zeros(1, 3, 8, 10), 4)


def test_sincos_positions_by_the_formula() -> None:
    rows, columns, dim = 3, 5, 16
    positions = mv.sincos_positions(dim, (rows, columns))
    for y in range(rows):
        for x in range(columns):
            expected = []
            for coordinate in (x, y):
                for wave in (math.sin, math.cos):
                    expected += [wave(coordinate / 10000 ** (4 * i / dim)) for i in range(dim // 4)]
            assert torch.allclose(positions[y * columns + x], torch.tensor(expected), atol=1e-6)
    with pytest.raises(ValueError, match="divisible by 4"):
        mv.sincos_positions(6, (2, 2))


def test_fixed_positions_leave_prefix_alone() -> None:
    vit = _vit()
    mv.fix_sincos_positions(vit)
    assert not vit.pos_embed.requires_grad
    assert float(vit.pos_embed[0, 0].abs().max()) == 0
    assert torch.equal(vit.pos_embed[0, 1:], mv.sincos_positions(24, (4, 4)))


def test_only_transformers_can_be_masked() -> None:
    with pytest.raises(UserError, match="mae hides patches"):
        mv.as_vit(nn.Linear(2, 2), method="mae")
    vit = _vit()
    assert mv.as_vit(vit, method="mae") is vit
    with pytest.raises(UserError, match="dynamic_img_size"):
        mv.as_vit(_vit(dynamic_img_size=True), method="mae")
