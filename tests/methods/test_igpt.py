"""Image GPT: its loss and palette as loops, and what each pixel sees."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny
from figures import draw
from minitask import MiniTask, loss_of, predicted
from selftask.errors import UserError
from selftask.methods.igpt import IGPT, palette_colors
from selftask.models.backbones.causal_attention import CausalAttention
from selftask.models.backbones.causal_vit import CausalViT
from selftask.models.features.extract import extract


def test_loss_is_the_mean_of_log_probabilities_of_the_next_colors() -> None:
    """-log of the softmax as loops; without a start token the first pixel is not predicted."""
    scores, colors = draw(0, 2, 4, 7), torch.tensor([[6, 0, 3, 2, 5], [1, 1, 6, 0, 4]])
    terms = []
    for image, place in product(range(2), range(4)):
        row = scores[image, place].tolist()
        color = int(colors[image, place + 1])
        terms.append(math.log(sum(math.exp(score) for score in row)) - row[color])
    loss = loss_of(IGPT(IGPT.Config()), predicted(scores), colors=colors)
    assert loss.item() == pytest.approx(sum(terms) / 8, rel=1e-12)


@pytest.mark.parametrize(("channels", "levels"), [(1, 8), (3, 3)])
def test_colors_are_the_nearest_of_a_grid(channels: int, levels: int) -> None:
    pixels = torch.rand(2, channels, 3, 5, generator=torch.Generator().manual_seed(0))
    pixels[0, :, 0, 0], pixels[1, :, 2, 4] = 0, 1
    middles = [(level + 0.5) / levels for level in range(levels)]
    grid = torch.tensor([c[::-1] for c in product(middles, repeat=channels)])  # the first fastest
    rows = pixels.permute(0, 2, 3, 1).flatten(1, 2)
    nearest = (rows[:, :, None] - grid).square().sum(dim=3).argmin(dim=2)
    assert torch.equal(palette_colors(pixels, levels), nearest)


def test_attention_is_to_earlier_tokens() -> None:
    """As sums of exponentials; a mask of the caller hides further tokens."""
    layer = CausalAttention(6, 2).double().requires_grad_(False)
    x = draw(0, 2, 5, 6)
    q, k, v = layer.qkv(x).view(2, 5, 3, 2, 3).permute(2, 0, 3, 1, 4)  # (2, heads, 5, 3)
    further = torch.ones(5, 5, dtype=torch.bool)
    further[4, 1] = False
    for mask in (None, further):
        rows = []
        for image, token in product(range(2), range(5)):
            seen = [j for j in range(token + 1) if mask is None or mask[token, j]]
            heads = []
            for head in range(2):
                weights = [
                    math.exp(q[image, head, token] @ k[image, head, j] / 3**0.5) for j in seen
                ]
                terms = zip(weights, seen, strict=True)
                heads.append(sum(w * v[image, head, j] for w, j in terms) / sum(weights))
            rows.append(layer.proj(torch.cat(heads)))
        torch.testing.assert_close(layer(x, attn_mask=mask), torch.stack(rows).view(2, 5, 6))


def test_a_pixel_is_predicted_from_those_before_it(tmp_path: Path) -> None:
    """The first one from the start token alone; in evaluations, tokens see no later pixel, too."""
    task = tiny.task("igpt", tmp_path)
    task.prepare()
    network = task.base_model
    images = torch.randn(2, 3, 32, 32)
    changed = images.clone()
    changed[:, :, 8:12, 12:] += 1  # of 8 x 8 patches: 19 to 23
    with torch.no_grad():
        first, second = (network([x]).prediction for x in (images, changed))
        layers = [extract(network.backbone, x, layers=(1,)) for x in (images, changed)]
    assert first.shape == (2, 64, 512)
    assert _changed(first, second) == [False] * 20 + [True] * 44
    hidden = [features.hidden[1].patches for features in layers]
    assert _changed(*hidden) == [False] * 19 + [True] * 45
    torch.testing.assert_close(first[0, 0], first[1, 0])
    task.close()


def _changed(first: Tensor, second: Tensor) -> list[bool]:
    """Return whether the tokens of any image differ."""
    return ((first - second).abs().amax(dim=(0, 2)) > 1e-6).tolist()


def test_targets_are_the_mean_colors_of_patches(tmp_path: Path) -> None:
    task = tiny.task("igpt", tmp_path)
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch = task.last_batch
    pixels = batch.all_views[0] * 0.22 + 0.14
    for image, row, column in product(range(4), range(8), range(8)):
        patch = pixels[image, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        color = batch["colors"][image, 8 * row + column].item()
        for mean in patch.mean(dim=(1, 2)).tolist():  # within the color's bin, but for rounding
            assert color % 8 - 1e-4 <= 8 * mean <= color % 8 + 1 + 1e-4
            color //= 8
    task.close()


def test_a_backbone_that_sees_later_pixels_is_refused() -> None:
    with pytest.raises(UserError, match="take causal_vit"):
        MiniTask("igpt", {})
    wrong = CausalViT(img_size=9, patch_size=2, embed_dim=10, num_heads=4)
    keys = [problem.partition(":")[0] for problem in wrong.problems({})]
    assert keys == ["backbone.img_size", "backbone.embed_dim"]
