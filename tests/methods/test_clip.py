"""CLIP against the pseudocode of its paper, and its text transformer."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.methods.clip import CLIP, match_pairs
from selftask.models.text import TextTransformer


def _random(*shape: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draws)


def test_loss_is_that_of_the_paper() -> None:
    """Figure 3 as loops: cross-entropy over captions for each image, and over images."""
    images, captions, tau, num = _random(5, 7), _random(5, 7, seed=1), 0.2, 5

    def similarity(i: int, j: int) -> float:
        a, b = images[i], captions[j]
        return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)) / tau

    total = 0.0
    for i in range(num):
        of_image = sum(math.exp(similarity(i, j)) for j in range(num))
        of_caption = sum(math.exp(similarity(j, i)) for j in range(num))
        total -= math.log(math.exp(similarity(i, i)) / of_image)
        total -= math.log(math.exp(similarity(i, i)) / of_caption)
    loss = match_pairs(images, captions, torch.tensor(-math.log(tau), dtype=torch.float64))
    assert loss.item() == pytest.approx(total / (2 * num), rel=1e-12)


def test_the_scale_of_logits_stays_below_100() -> None:
    method = CLIP(CLIP.Config(temperature=0.02))
    assert method.log_scale.exp().item() == pytest.approx(50)
    method.log_scale.data += 1
    method.on_update(None)  # type: ignore[arg-type]
    assert method.log_scale.exp().item() == pytest.approx(100)


def _text(length: int = 6) -> TextTransformer:
    torch.manual_seed(0)
    text = TextTransformer(11, length, dim=8, depth=2, heads=2).double()
    for parameter in text.parameters():
        nn.init.normal_(parameter, std=0.3)
    return text


def test_the_text_transformer_is_that_of_its_formula() -> None:
    """Pre-norm blocks with causal attention, written out for one text at a time."""
    text = _text()
    tokens = torch.tensor([[9, 1, 2, 10, 0, 0], [9, 3, 10, 0, 0, 0], [9, 1, 4, 2, 7, 10]])
    for row, features in zip(tokens, text(tokens), strict=True):
        ids = row[row != 0]
        x = text.token_embed.weight[ids] + text.pos_embed[: len(ids)]
        for block in text.blocks:
            x = x + _attention(block, F.layer_norm(x, (8,), block.norm1.weight, block.norm1.bias))
            hidden = F.layer_norm(x, (8,), block.norm2.weight, block.norm2.bias)
            x = x + block.linear2(F.gelu(block.linear1(hidden)))
        expected = F.layer_norm(x[-1], (8,), text.norm.weight, text.norm.bias)
        torch.testing.assert_close(features, expected)


def _attention(block: nn.Module, x: Tensor) -> Tensor:
    """Each of 2 heads of width 4: a token sees itself and what stands before it."""
    q, k, v = (x @ block.self_attn.in_proj_weight.T + block.self_attn.in_proj_bias).chunk(3, dim=1)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        rows = []
        for place in range(len(x)):
            weights = (k[: place + 1, head] @ q[place, head] / 2).softmax(dim=0)
            rows.append(weights @ v[: place + 1, head])
        heads.append(torch.stack(rows))
    return block.self_attn.out_proj(torch.cat(heads, dim=1))


def test_first_weights_are_those_of_the_papers_code() -> None:
    text = TextTransformer(500, 50, dim=64, depth=4, heads=4)
    block: nn.Module = text.blocks[0]
    wanted = {
        text.token_embed.weight: 0.02,
        text.pos_embed: 0.01,
        block.self_attn.in_proj_weight: 64**-0.5,
        block.self_attn.out_proj.weight: 64**-0.5 * 8**-0.5,
        block.linear1.weight: 128**-0.5,
        block.linear2.weight: 64**-0.5 * 8**-0.5,
    }
    for weight, std in wanted.items():
        assert weight.std().item() == pytest.approx(std, rel=0.06)
