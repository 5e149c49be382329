"""SimMIM against its paper and the published code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from minitask import MiniTask
from selftask.errors import UserError
from selftask.methods.simmim import masked_l1

EPS = 1e-5  # the published code adds it to the number of masked pixels


def _draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Standard normal numbers times ``scale``, as the inputs of the published code's figures."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def _bits(seed: int, *shape: int, share: float) -> Tensor:
    values = _draw(seed, *shape)
    return values < values.flatten().sort().values[int(share * values.numel())]


def _vit(**args: Any) -> nn.Module:
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2}
    return VisionTransformer(num_classes=0, **{**sizes, **args})


def _swin() -> nn.Module:
    sizes: dict[str, Any] = {"embed_dim": 6, "depths": (1, 1), "num_heads": (1, 2)}
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224",
        **{"num_classes": 0, "img_size": 8, "patch_size": 1, "window_size": 2, **sizes},
    )
    swin.embed_dim = swin.head_hidden_size
    return swin


def _task(backbone: Any = _vit, **config: Any) -> MiniTask:
    return MiniTask("simmim", {"mask_size": 4, **config}, backbone=backbone, sizes=(8,), lr=0.1)


def test_loss_and_gradients_are_those_of_the_published_code() -> None:
    """microsoft/SimMIM; figures of shared/oracles, computed with its own code in float64."""
    images, mask = _draw(0, 2, 3, 32, 32), _bits(1, 2, 8, 8, share=0.6)
    encoded = _draw(2, 2, 6, 4, 4).requires_grad_()
    decoder = nn.Sequential(nn.Conv2d(6, 192, 1), nn.PixelShuffle(8)).double()
    with torch.no_grad():
        decoder[0].weight.copy_(_draw(3, 192, 6, 1, 1, scale=0.2))
        decoder[0].bias.copy_(_draw(4, 192, scale=0.1))
    loss = masked_l1(decoder(encoded), images, mask)
    loss.backward()
    assert int(mask.sum()) == 76
    theirs = 76 * 16 / (76 * 16 + EPS)
    assert loss.item() * theirs == pytest.approx(0.8664985807069107, rel=1e-9)
    assert encoded.grad.norm().item() * theirs == pytest.approx(0.014142137853610655, rel=1e-9)
    weight = decoder[0].weight.grad.norm().item()
    assert weight * theirs == pytest.approx(0.039757980198744165, rel=1e-9)


@pytest.mark.parametrize("backbone", [_vit, _swin])
def test_loss_is_that_of_the_paper(backbone: Any) -> None:
    """Section 3.4: L1 distance of the masked pixels, over their number."""
    task = _task(backbone)
    batch = task.forward(torch.arange(4))
    images, mask = batch.all_views[0], batch["mask"]
    output = batch.output.prediction.detach()
    assert output.shape == images.shape
    side = 8 // mask.shape[1]
    distances = [
        abs(float(output[i, c, y, x] - images[i, c, y, x]))
        for i in range(4)
        for c in range(3)
        for y in range(8)
        for x in range(8)
        if mask[i, y // side, x // side]
    ]
    assert len(distances) == 4 * 3 * 3 * 16  # of four squares of 16 pixels, three
    expected = sum(distances) / len(distances)
    assert task.loss(batch.output, batch).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("backbone", [_vit, _swin])
def test_hidden_pixels_do_not_reach_the_network(backbone: Any) -> None:
    task = _task(backbone)
    images = task.views[0][:4].clone().requires_grad_()
    batch = task.forward(torch.arange(4), images)
    batch.output.prediction.sum().backward()
    side = 8 // batch["mask"].shape[1]
    seen = images.grad.abs().unfold(2, side, side).unfold(3, side, side).sum(dim=(1, 4, 5)) > 0
    assert torch.equal(seen, ~batch["mask"])
    assert task.base_model.mask_token.grad.abs().sum() > 0


@pytest.mark.parametrize("backbone", [_vit, _swin])
def test_simmim_training_lowers_the_loss(backbone: Any) -> None:
    losses = _task(backbone).run(8).losses
    assert losses[-1] < 0.98 * losses[0]
    assert all(math.isfinite(loss) for loss in losses)


def test_impossible_sizes_are_told() -> None:
    with pytest.raises(UserError, match=r"mask_size=3 pixels .* patches of 2 pixels"):
        _task(mask_size=3)
    with pytest.raises(UserError, match=r"images of 8x8 pixels cannot .* squares of 6 pixels"):
        _task(mask_size=6)
    with pytest.raises(UserError, match="gives one vector an image"):
        MiniTask("simmim", {})
