"""The predictor of patches and its sine-cosine positions."""

from __future__ import annotations

import math

import pytest
import torch
from timm.models import VisionTransformer
from torch import nn

from selftask.models.predictors.patch_predictor import (
    PatchPredictor,
    fix_sincos_positions,
    sincos_positions,
)


def test_sincos_positions_by_the_formula() -> None:
    rows, columns, dim = 3, 5, 16
    positions = sincos_positions(dim, (rows, columns))
    for y in range(rows):
        for x in range(columns):
            expected = []
            for coordinate in (x, y):
                for wave in (math.sin, math.cos):
                    expected += [wave(coordinate / 10000 ** (4 * i / dim)) for i in range(dim // 4)]
            assert torch.allclose(positions[y * columns + x], torch.tensor(expected), atol=1e-6)
    with pytest.raises(ValueError, match="divisible by 4"):
        sincos_positions(6, (2, 2))


def test_fixed_positions_leave_prefix_alone() -> None:
    vit = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=1, num_heads=2, num_classes=0
    )
    fix_sincos_positions(vit)
    assert not vit.pos_embed.requires_grad
    assert float(vit.pos_embed[0, 0].abs().max()) == 0
    assert torch.equal(vit.pos_embed[0, 1:], sincos_positions(24, (4, 4)))


def _predictor() -> PatchPredictor:
    predictor = PatchPredictor(24, (4, 4), dim=8, depth=2, num_heads=2, num_out=5)
    for parameter in predictor.parameters():
        nn.init.normal_(parameter, std=0.3)
    return predictor


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_predictor_ignores_padding_and_order(prefix: int) -> None:
    """Patches that only fill rows change nothing; neither does the order of the others."""
    predictor = _predictor()
    encoded = torch.randn(2, prefix + 5, 24)
    keep = torch.stack([torch.randperm(16)[:5] for _ in range(2)])
    predict = torch.stack([torch.randperm(16)[:8].view(2, 4) for _ in range(2)])  # (2, 2, 4)
    counts, predict_counts = torch.tensor([3, 5]), torch.tensor([[4, 2], [1, 3]])
    padding = torch.arange(5) >= counts[:, None]
    predict_padding = torch.arange(4) >= predict_counts[..., None]
    padded = predictor(encoded, keep, predict, padding=padding, predict_padding=predict_padding)
    assert padded.shape == (2, 2, 4, 5)
    for image, group in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        kept, wanted = int(counts[image]), int(predict_counts[image, group])
        order = torch.randperm(kept)
        alone = predictor(
            torch.cat([encoded[image, :prefix], encoded[image, prefix:][order]])[None],
            keep[image, order][None],
            predict[image, group, :wanted].flip(0)[None, None],
        )
        assert torch.allclose(padded[image, group, :wanted], alone[0, 0].flip(0), atol=1e-5)


def test_predictor_knows_places_by_their_positions_only() -> None:
    predictor = _predictor()
    encoded, keep = torch.randn(1, 2, 24), torch.tensor([[3, 9]])
    predict = torch.tensor([[[5, 6]]])
    there = predictor(encoded, keep, predict)
    assert not torch.allclose(there[0, 0, 0], there[0, 0, 1])  # same mask token, other place
    assert not torch.allclose(there, predictor(encoded, keep.flip(1), predict))
    predictor.positions.zero_()
    nowhere = predictor(encoded, keep, predict)
    assert torch.allclose(nowhere[0, 0, 0], nowhere[0, 0, 1], atol=1e-6)
    assert torch.allclose(nowhere, predictor(encoded, keep.flip(1), predict), atol=1e-6)
    assert "positions" not in predictor.state_dict()


def test_another_grid_has_positions_of_its_own() -> None:
    """As a predictor built for that grid."""
    predictor, other = (
        _predictor(),
        PatchPredictor(24, (2, 3), dim=8, depth=2, num_heads=2, num_out=5),
    )
    other.load_state_dict(predictor.state_dict())
    encoded, keep = torch.randn(1, 2, 24), torch.tensor([[0, 5]])
    predict = torch.tensor([[[1, 4]]])
    there = predictor(encoded, keep, predict, grid=(2, 3))
    assert torch.equal(there, other(encoded, keep, predict))
    assert not torch.allclose(there, predictor(encoded, keep, predict))
