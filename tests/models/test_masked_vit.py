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


def test_patchify_cuts_row_by_row() -> None:
    images = torch.randn(2, 3, 8, 12)
    patches = mv.patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    for number in range(6):
        top, left = 4 * (number // 3), 4 * (number % 3)
        patch = images[:, :, top : top + 4, left : left + 4]
        assert torch.equal(patches[:, number], patch.permute(0, 2, 3, 1).reshape(2, -1))
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


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(UserError, match="32x32 pixels for a backbone built for 16x16"):
        mv.patch_tokens(_vit(), torch.zeros(1, 3, 32, 32))


def test_padded_indices_are_the_true_places() -> None:
    mask = torch.rand(5, 3, 16) < 0.4
    indices, padding = mv.padded_indices(mask, 16)
    for row, places, fill in zip(
        mask.flatten(0, 1), indices.flatten(0, 1), padding.flatten(0, 1), strict=True
    ):
        assert places[~fill].tolist() == row.nonzero().flatten().tolist()
        assert sorted(places.tolist()) == list(range(16))
    short, none = mv.padded_indices(torch.ones(1, 16, dtype=torch.bool), 3)
    assert short.tolist() == [[0, 1, 2]]
    assert not none.any()


def test_padded_indices_lose_the_last_of_an_order() -> None:
    mask = torch.tensor([[True, False, True, True, False, True]])
    order = torch.tensor([[0.9, 0.0, 0.1, 0.999, 0.0, 0.0]])
    indices, padding = mv.padded_indices(mask, 3, order)
    assert indices.tolist() == [[5, 2, 0]]
    assert not padding.any()


def _predictor(vit: VisionTransformer) -> mv.PatchPredictor:
    predictor = mv.PatchPredictor(vit, dim=8, depth=2, num_heads=2, num_out=5)
    for parameter in predictor.parameters():
        nn.init.normal_(parameter, std=0.3)
    return predictor


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_predictor_ignores_padding_and_order(layout: dict) -> None:
    """Patches that only fill rows change nothing; neither does the order of the others."""
    vit = _vit(**layout)
    predictor = _predictor(vit)
    prefix = vit.num_prefix_tokens
    encoded = torch.randn(2, prefix + 5, 24)
    keep = torch.stack([torch.randperm(16)[:5] for _ in range(2)])
    asked = torch.stack([torch.randperm(16)[:8].view(2, 4) for _ in range(2)])  # (2, 2, 4)
    counts, asked_counts = torch.tensor([3, 5]), torch.tensor([[4, 2], [1, 3]])
    padding = torch.arange(5) >= counts[:, None]
    asked_padding = torch.arange(4) >= asked_counts[..., None]
    padded = predictor(encoded, keep, asked, padding=padding, asked_padding=asked_padding)
    assert padded.shape == (2, 2, 4, 5)
    for image, group in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        kept, wanted = int(counts[image]), int(asked_counts[image, group])
        order = torch.randperm(kept)
        alone = predictor(
            torch.cat([encoded[image, :prefix], encoded[image, prefix:][order]])[None],
            keep[image, order][None],
            asked[image, group, :wanted].flip(0)[None, None],
        )
        assert torch.allclose(padded[image, group, :wanted], alone[0, 0].flip(0), atol=1e-5)


def test_predictor_knows_places_by_their_positions_only() -> None:
    predictor = _predictor(_vit(class_token=False, global_pool="avg"))
    encoded, keep = torch.randn(1, 2, 24), torch.tensor([[3, 9]])
    asked = torch.tensor([[[5, 6]]])
    there = predictor(encoded, keep, asked)
    assert not torch.allclose(there[0, 0, 0], there[0, 0, 1])  # same mask token, other place
    assert not torch.allclose(there, predictor(encoded, keep.flip(1), asked))
    predictor.positions.zero_()
    nowhere = predictor(encoded, keep, asked)
    assert torch.allclose(nowhere[0, 0, 0], nowhere[0, 0, 1], atol=1e-6)
    assert torch.allclose(nowhere, predictor(encoded, keep.flip(1), asked), atol=1e-6)
    assert "positions" not in predictor.state_dict()
