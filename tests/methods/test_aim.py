"""AIM against the figures of its authors' model, and what each patch sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from timm.layers import Attention
from torch import Tensor

from figures import draw
from selftask.batch import Batch
from selftask.methods.aim import AIM, next_patch_loss, prefix_causal
from selftask.methods.mae import normalize, patchify

# apple/ml-aim for seeds 0 and 500: norm, sum and gradient of its attention; the published objective
# (loss, gradient) over all predicted patches of the batch
ATTENTION = {
    0: (5.859695138816541, -2.575685341418194, 14.959511555457055),
    500: (6.813248442943353, 9.593271824504619, 20.455842899246136),
}
LOSS = {0: (1.93001291105453, 0.07578974894275047), 500: (1.9624099694626855, 0.07642320237660867)}


def _mask(num_patches: int) -> Tensor:
    """Prefixes of 3 and 0 patches."""
    return torch.arange(num_patches) >= torch.tensor([[3], [0]])


@pytest.mark.parametrize("seed", ATTENTION)
def test_attention_is_that_of_the_authors_model(seed: int) -> None:
    layer = Attention(16, 4).double()
    layer.qkv.weight.data = draw(seed, 48, 16, scale=0.2)
    layer.qkv.bias = None
    layer.proj.weight.data = draw(seed + 1, 16, 16, scale=0.2)
    torch.nn.init.zeros_(layer.proj.bias)
    x = draw(seed + 2, 2, 9, 16).requires_grad_()
    output = layer(x, attn_mask=prefix_causal(_mask(9))[:, None])
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    actual = (output.norm().item(), output.sum().item(), gradient.norm().item())
    assert actual == pytest.approx(ATTENTION[seed], rel=1e-9)
    assert prefix_causal(_mask(9))[0].sum(dim=1).tolist() == [3, 3, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("seed", LOSS)
def test_loss_is_the_published_objective(seed: int) -> None:
    """There over all patches of the batch: here the means of images, weighted by their numbers."""
    pixels = normalize(patchify(draw(seed + 3, 2, 3, 16, 16), 4))
    prediction, mask = draw(seed + 4, 2, 16, 48).requires_grad_(), _mask(16)
    of_images = [
        next_patch_loss(prediction[i : i + 1], pixels[i : i + 1], mask[i : i + 1]) for i in range(2)
    ]
    counts = mask[:, 1:].sum(dim=1)
    loss = (torch.stack(of_images) * counts).sum() / counts.sum()
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert (loss.item(), gradient.norm().item()) == pytest.approx(LOSS[seed], rel=1e-9)
    mean = next_patch_loss(prediction, pixels, mask)
    assert mean.item() == pytest.approx(torch.stack(of_images).mean().item(), rel=1e-12)


@pytest.mark.parametrize("normalized", [True, False])
def test_targets_are_the_patches_of_the_image(normalized: bool) -> None:
    """Standardized by default, as in the paper."""
    method = AIM(AIM.Config() if normalized else AIM.Config(normalize_pixels=False))
    method.patch_size = 4
    none = torch.empty(0, dtype=torch.int64)
    images = draw(1, 2, 3, 8, 8) + 2
    batch = Batch(views={"main": [images]}, labels=none, index=none, key=none)
    method.on_forward(SimpleNamespace(last_batch=batch))
    for row in range(2):
        for column in range(2):
            patch = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            expected = patch.permute(0, 2, 3, 1).flatten(1)
            if normalized:
                deviation = (expected.var(dim=1, keepdim=True) + 1e-6).sqrt()
                expected = (expected - expected.mean(dim=1, keepdim=True)) / deviation
            torch.testing.assert_close(batch["pixels"][:, 2 * row + column], expected)


def test_prefixes_have_all_lengths() -> None:
    """From 1 to N - 1, equally often, whatever the batch."""
    key = torch.stack([torch.arange(3000), torch.zeros(3000, dtype=torch.long)], dim=1)
    mask = AIM(AIM.Config()).draw_mask(5, key, (2, 2))
    counts = (~mask).sum(dim=1).bincount(minlength=5).tolist()
    assert counts[0] == counts[4] == 0
    assert all(abs(count - 1000) < 120 for count in counts[1:4])
    alone = AIM(AIM.Config()).draw_mask(5, key[7:8], (2, 2))
    assert torch.equal(alone, mask[7:8])
